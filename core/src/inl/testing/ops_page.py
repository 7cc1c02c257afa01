"""The page on ops, written from the catalog: ``python -m inl.testing.ops_page``."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING

from inl.ops import catalog

if TYPE_CHECKING:
    from inl.spec.op import OpSpec

HEAD = """\
# Ops

Every op of the catalog, in alphabetical order. This page is written by
`python -m inl.testing.ops_page > docs/ops.md`.

The body of an op, a function of NumPy arrays in float64, is its specification; a
kernel takes the same arguments and has to come as near to it as rounding allows. The
signature of a *composite* begins with `ops`, which a kernel for it does not take: its
body calls other ops, so a backend can leave it out. What stands after `*` is an
attribute, a plain Python value that is known when the kernel is chosen. An argument
that is *taken over* must not be used again by the caller: the kernel may write into it,
and gives it back.
"""


def ops_page() -> str:
    """Markdown of the whole page."""
    specs = sorted(catalog().values(), key=lambda spec: spec.name)
    return "\n".join([HEAD, *(_section(spec) for spec in specs)])


def _section(spec: OpSpec) -> str:
    facts = [f"- kind: {'composite' if spec.composite else 'primitive'}"]
    fields = getattr(spec.weights, "__annotations__", {})
    if spec.weights is not None:
        given = getattr(spec.weights, "_field_defaults", {})
        names = [f"`{n}`{' (may be None)' if n in given else ''}" for n in fields]
        facts.append(f"- weights `w`, a `{spec.weights.__name__}`: {', '.join(names)}")
    if spec.consumes:
        facts.append(f"- takes over: {', '.join(f'`{n}`' for n in spec.consumes)}")
    stored = "the compute dtype" if spec.rounds else "float32"
    facts.append(f"- floating results are stored in {stored}")
    facts.append(f"- may err {spec.tolerance:g} times what storing costs the body")
    lines = (
        f"## {spec.name}",
        f"```python\n{spec.name}{signature(spec)}\n```",
        _markdown(inspect.getdoc(spec.body) or ""),
        "\n".join(facts),
    )
    return "\n\n".join(lines) + "\n"


def signature(spec: OpSpec) -> str:
    """Parameters and result with the types that the body declares."""
    found = inspect.signature(spec.body)
    return str(found).replace("'", "")


def _markdown(text: str) -> str:
    """Docstrings are reStructuredText: its roles and literals become code."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.stdout.write(ops_page())
