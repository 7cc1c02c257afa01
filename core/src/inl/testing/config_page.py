"""Generator of docs/engine-config.md: ``python -m inl.testing.config_page``."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from typing import NamedTuple

from inl.config import EngineConfig

HEAD = """\
# Engine configuration

Every field of `inl.EngineConfig`, in definition order. All fields are keyword arguments
and have a default. A value out of range raises `RequestError`. This page is written by
`python -m inl.testing.config_page > docs/engine-config.md`.

```python
from inl import EngineConfig

config = EngineConfig(backend="cpu", context=2048, max_batch=4)
```
"""


class Field(NamedTuple):
    """One field of :class:`~inl.config.EngineConfig`, as its source has it."""

    name: str
    type: str
    default: str
    doc: str


def config_page() -> str:
    """Return the Markdown of the whole page."""
    return "\n".join([HEAD, *map(_section, config_fields())])


def config_fields() -> list[Field]:
    """Read the fields and the docstrings below them from the source of the class."""
    source = textwrap.dedent(inspect.getsource(EngineConfig))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    fields = []
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        fields.append(
            Field(
                ast.unparse(node.target),
                ast.unparse(node.annotation),
                ast.get_source_segment(source, node.value) or "",
                _docstring(following),
            )
        )
    return fields


def _docstring(node: ast.stmt) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _section(field: Field) -> str:
    lines = (
        f"## {field.name}",
        f"`{field.type}`, default `{field.default}`",
        _markdown(field.doc),
    )
    return "\n\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Convert the roles and literals of reStructuredText to code spans."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.stdout.write(config_page())
