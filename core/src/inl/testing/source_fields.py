"""Reads the fields of a class, and the docstrings below them, from its source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import NamedTuple


class Field(NamedTuple):
    """One annotated field of a class, as its source has it."""

    name: str
    type: str
    default: str
    """Empty for a field without a default."""
    doc: str


def fields_of(cls: type) -> list[Field]:
    """Return the fields of a dataclass or NamedTuple, in order."""
    source = textwrap.dedent(inspect.getsource(cls))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    following: list[ast.stmt | None] = [*definition.body[1:], None]
    fields = []
    for node, after in zip(definition.body, following, strict=True):
        if isinstance(node, ast.AnnAssign):
            default = node.value and ast.get_source_segment(source, node.value)
            name, kind = ast.unparse(node.target), ast.unparse(node.annotation)
            fields.append(Field(name, kind, default or "", _docstring(after)))
    return fields


def _docstring(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def markdown(text: str) -> str:
    """Convert the roles and literals of reStructuredText to code spans."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
