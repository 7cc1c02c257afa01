"""Generator of docs/ops.md from the catalog: ``python -m inl.testing.ops_page``."""

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

The body of an op, a function of NumPy arrays in float64, is its specification. A
kernel takes the same arguments, and its result may differ from the body's only within
the op's tolerance: a multiple of the error that storing results in the dtype causes.
The body of a *composite* calls other ops through its first parameter, `ops`, which a
kernel does not take; a backend needs no kernel for a composite. Parameters after `*`
are attributes: plain Python values that are known when a kernel is selected. A
*consumed* argument must not be used again by the caller: the kernel may modify it in
place, and returns it.
"""


def ops_page() -> str:
    """Return the Markdown of the whole page."""
    specs = sorted(catalog().values(), key=lambda spec: spec.name)
    return "\n".join([HEAD, *(_section(spec) for spec in specs)])


def _section(spec: OpSpec) -> str:
    facts = [f"- kind: {'composite' if spec.composite else 'primitive'}"]
    fields = getattr(spec.weights, "__annotations__", {})
    if spec.weights is not None:
        optional = getattr(spec.weights, "_field_defaults", {})
        names = [f"`{n}`{' (may be None)' if n in optional else ''}" for n in fields]
        facts.append(f"- weights `w`, a `{spec.weights.__name__}`: {', '.join(names)}")
    if spec.consumes:
        facts.append(f"- consumes: {', '.join(f'`{n}`' for n in spec.consumes)}")
    stored = "the compute dtype" if spec.rounds else "float32"
    facts.append(f"- floating-point results are stored in {stored}")
    facts.append(f"- tolerance: {spec.tolerance:g} times the storage error of the body")
    lines = (
        f"## {spec.name}",
        f"```python\n{spec.name}{signature(spec)}\n```",
        _markdown(inspect.getdoc(spec.body) or ""),
        "\n".join(facts),
    )
    return "\n\n".join(lines) + "\n"


def signature(spec: OpSpec) -> str:
    """Return the signature of the body with its annotations."""
    return str(inspect.signature(spec.body)).replace("'", "")


def _markdown(text: str) -> str:
    """Convert the roles and literals of reStructuredText to code spans."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.stdout.write(ops_page())
