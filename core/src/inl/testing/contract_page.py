"""Generator of docs/contract.md: ``python -m inl.testing.contract_page``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from inl.adapters.weights import AdaptedWeights
from inl.backend import base, block_io, collectives, provisional
from inl.backend.bandwidth import Bandwidth
from inl.backend.tunable import Facts, Tunable
from inl.backend.weight_cache import WeightCache
from inl.dtypes import HostArray
from inl.ops import catalog
from inl.placement.mesh import Mesh, Meshes
from inl.placement.placement import Placement
from inl.plugin import CONTRACT, FEATURES
from inl.plugin.check import dotted
from inl.spec import message
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.embedded_rows import EmbeddedRows
from inl.spec.encoder import SequenceBatch
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message_layout import (
    AdmissionWords,
    BlockTableUpdate,
    RowWords,
    TokenBias,
    TokenBiasWords,
    TransferWords,
)
from inl.spec.op import OpSpec
from inl.spec.program import PROGRAMS, ProgramInfo
from inl.spec.step import PARAMS, Bucket, Scores, Step, Tables
from inl.testing.contract_text import (
    FEATURE,
    GROWTH,
    HEAD,
    HOST,
    KERNELS,
    MESSAGE,
    MINIMAL,
    OFFERS,
    OPS,
    PROGRAM,
    PROMISE,
    PROVISIONAL,
    VALUES,
    WEIGHTS,
)
from inl.testing.llama_ops import llama_ops
from inl.testing.source_fields import fields_of, markdown

CAPABILITIES: dict[str, tuple[type, ...]] = {
    "programs": (base.Precompiler, base.ContextLengths),
    "weights": (
        base.StorageDtypes, base.PackedKernels, base.WeightUpdates, AdaptedWeights,
        WeightCache,
    ),
    "several devices": (
        collectives.Ranks, collectives.Rank, collectives.Collectives, Meshes, Mesh,
        Placement,
    ),
    "memory and processes": (
        base.CacheBytes, base.CachedMemory, base.ForkSafety, Bandwidth,
    ),
    "copies of a cache": (
        block_io.BlockIO, block_io.Blocks, block_io.SlotIO, block_io.Addresses,
        block_io.MemoryRange,
    ),
    "tuning": (Tunable, Facts),
}  # fmt: skip
"""Capabilities, and the values that belong to them, by heading."""

BETWEEN_STEPS = ("admit", "set_token_bias", "read_blocks", "write_blocks", "read_slot",
                 "write_slot", "encode", "encode_part")  # fmt: skip


def contract_page() -> str:
    """Return the page as Markdown."""
    sections = [
        HEAD.format(contract=dotted(CONTRACT)), MINIMAL, _methods(base.Backend),
        _counts(), PROMISE.format(growth=_rows(GROWTH[0], GROWTH[1:])),
        FEATURE, _features(), HOST, _table(HostArray),
        VALUES, *map(_table, (Bucket, Step, EmbeddedRows, SequenceBatch, Tables)),
        *map(_table, (Scores, Limits, Cache, State, Paged, Slotted)), _params(),
        *map(_table, (base.Traits, base.DeviceMemory)),
        KERNELS, _table(Kernel), WEIGHTS, *map(_table, _weights()), _takers(),
        _passing(), PROGRAM, _programs(), _table(ProgramInfo),
        MESSAGE, _message(),
        *map(_table, (message.Header, RowWords, BlockTableUpdate)),
        *map(_table, (AdmissionWords, TokenBiasWords, TokenBias, TransferWords)),
        OFFERS, *_capabilities(), PROVISIONAL, _provisional(),
    ]  # fmt: skip
    return "\n".join(sections)


def _capabilities() -> Iterator[str]:
    for heading, classes in CAPABILITIES.items():
        yield f"## Capabilities: {heading}\n"
        yield from map(_table, classes)


def _features() -> str:
    rows = [(f"`{name}`", f"{text}.") for name, text in sorted(FEATURES.items())]
    return _rows(("feature", "meaning"), rows)


def _provisional() -> str:
    rows = [
        (f"`inl.backend.provisional.{name}`", markdown(inspect.getdoc(each) or ""))
        for name, each in vars(provisional).items()
        if getattr(each, "__module__", "") == provisional.__name__
    ]
    lines = ((name, doc.partition("\n")[0]) for name, doc in rows)
    return _rows(("name", "what it is"), lines)


def _params() -> str:
    promise = "[the promise](#the-promise)"
    return f"`PARAMS` is {_spans(PARAMS)}. It is closed, see {promise}.\n"


def _counts() -> str:
    specs = catalog().values()
    primitives = [spec.name for spec in specs if not spec.composite]
    needed = [name for name in llama_ops() if name in primitives]
    few = {spec.name: spec.used_by for spec in specs if spec.used_by}
    others = sorted(set(primitives) - set(needed) - few.keys())
    return OPS.format(
        ops=len(specs), primitives=len(primitives),
        composites=len(specs) - len(primitives), needed=len(needed),
        names=_spans(needed), others=_spans(others),
        few=", ".join(f"`{name}` ({by})" for name, by in sorted(few.items())),
    )  # fmt: skip


def _programs() -> str:
    rows = []
    for name, signature in PROGRAMS.items():
        arguments, _, results = signature.partition(" -> ")
        at = f"`({arguments.count(',')},)`: the state"
        consumed = at if "state" in results else "`()`"
        bucket = "none" if name in BETWEEN_STEPS else "the step's"
        rows.append((f"`{name}`", f"`{signature}`", consumed, bucket))
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
    """Return a section with the fields of a class, and its methods if it has any."""
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
    parts = [f"### {cls.__name__}\n\n`{cls.__module__}.{cls.__name__}`. {doc}\n"]
    if rows:
        parts.append(_rows(("field", "type", "default", "meaning"), rows))
    if inspect.isabstract(cls):
        parts.append(_methods(cls))
    return "\n".join(parts)


def _methods(cls: type) -> str:
    """Return a table of the methods of an abstract class, the required ones first."""
    rows = [
        (
            f"`{name}{_signature(method)}`".replace("|", "\\|"),
            "yes" if is_abstract else "",
            markdown(" ".join((inspect.getdoc(method) or "").split())),
        )
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and not name.startswith("_")
        for is_abstract in [getattr(method, "__isabstractmethod__", False)]
    ]
    rows.sort(key=lambda row: not row[1])
    return _rows(("method", "required", "meaning"), rows)


def _signature(method: Any) -> str:
    signature = inspect.signature(method)
    without_self = list(signature.parameters.values())[1:]
    text = str(signature.replace(parameters=without_self))
    return re.sub(r"'([^']+)'", r"\1", text)  # annotations are strings


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _spans(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(contract_page())
