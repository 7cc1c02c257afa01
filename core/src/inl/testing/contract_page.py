"""Generator of docs/contract.md: ``python -m inl.testing.contract_page``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Sequence

from inl.backend import base, collectives
from inl.dtypes import HostArray
from inl.ops import catalog
from inl.spec import message
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.embedded_rows import EmbeddedRows
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message_layout import (
    AdmissionWords,
    BlockTableUpdate,
    RowWords,
    TokenBias,
    TokenBiasWords,
)
from inl.spec.op import OpSpec
from inl.spec.program import PROGRAMS, ProgramInfo
from inl.spec.step import PARAMS, Bucket, Scores, Step, Tables
from inl.testing.contract_text import (
    CAPABILITIES,
    HEAD,
    HOST,
    KERNELS,
    MESSAGE,
    OPS,
    PROGRAM,
    VALUES,
    WEIGHTS,
)
from inl.testing.llama_ops import llama_ops
from inl.testing.source_fields import fields_of, markdown

SPECIALIZED = (base.Precompiler, base.ContextLengths, base.DeviceLoops,
               base.CachedMemory, base.ForkSafety, base.Ranks, collectives.Rank,
               base.StorageDtypes, base.DecodedBlocks, base.PackedKernels)  # fmt: skip


def contract_page() -> str:
    """Return the page as Markdown."""
    sections = [
        HEAD, _counts(), PROGRAM, _programs(), _table(ProgramInfo),
        VALUES, *map(_table, (Bucket, Step, EmbeddedRows, Tables, Scores, Limits)),
        *map(_table, (Cache, State)),
        *map(_table, (Paged, Slotted)), f"`PARAMS` is {_spans(PARAMS)}.\n",
        MESSAGE, _message(),
        *map(_table, (message.Header, RowWords, BlockTableUpdate)),
        *map(_table, (AdmissionWords, TokenBiasWords, TokenBias)),
        KERNELS, _table(Kernel), WEIGHTS, *map(_table, _weights()), _takers(),
        _passing(), HOST, _table(HostArray), CAPABILITIES,
        *map(_table, (base.Traits, base.DeviceMemory, *SPECIALIZED)),
    ]  # fmt: skip
    return "\n".join(sections)


def _counts() -> str:
    specs = catalog().values()
    primitives = [spec.name for spec in specs if not spec.composite]
    needed = [name for name in llama_ops() if name in primitives]
    return OPS.format(
        ops=len(specs), primitives=len(primitives),
        composites=len(specs) - len(primitives), needed=len(needed),
        names=_spans(needed),
        others=_spans(sorted(set(primitives) - set(needed))),
    )  # fmt: skip


def _programs() -> str:
    rows = []
    for name, signature in PROGRAMS.items():
        at = signature.partition(")")[0].count(",")
        bucket = "none" if name in ("admit", "set_token_bias") else "the step's"
        rows.append((f"`{name}`", f"`{signature}`", f"`({at},)`: the state", bucket))
    return _rows(("program", "arguments and results", "`consumes`", "bucket"), rows)


def _weights() -> list[type]:
    kinds = {spec.weights: None for spec in catalog().values() if spec.weights}
    return [kind for kind in kinds if kind is not None]


def _takers() -> str:
    rows = [
        (f"`{kind.__name__}`", _spans(s.name for s in _taking(kind)))
        for kind in _weights()
    ]
    return "Ops that take each tuple as `w`:\n\n" + _rows(("tuple", "ops"), rows)


def _taking(kind: type) -> list[OpSpec]:
    return [spec for spec in catalog().values() if spec.weights is kind]


def _passing() -> str:
    names = [spec.name for spec in catalog().values() if spec.layout_opaque]
    return (
        f"These composites pass `w` on unread, in any layout: {_spans(names)}. All "
        "others read the fields of `w`, and take packed weights only in a kernel of "
        "their own.\n"
    )


def _message() -> str:
    """The docstring of the module, whose indented block is the layout of a step."""
    text = inspect.getdoc(message) or ""
    body = text.partition("\n\n")[2]
    blocks = re.sub(r"::\n\n((?:    .*\n)+)", _fenced, body + "\n")
    return markdown(blocks)


def _fenced(match: re.Match[str]) -> str:
    return f":\n\n```text\n{inspect.cleandoc(match[1])}\n```\n"


def _table(cls: type) -> str:
    """Return a section with the fields of a class."""
    rows = [
        (
            f"`{field.name}`",
            f"`{field.type}`".replace("|", "\\|"),
            f"`{field.default}`" if field.default else "",
            markdown(" ".join(field.doc.split())),
        )
        for field in fields_of(cls)
    ]
    doc = markdown(inspect.getdoc(cls) or "")
    heading = f"### {cls.__name__}\n\n`{cls.__module__}.{cls.__name__}`. {doc}\n\n"
    return heading + _rows(("field", "type", "default", "meaning"), rows)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _spans(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(contract_page())
