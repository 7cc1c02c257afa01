"""The accepted forms of the ``structured`` option, and their grammars as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from inl.errors import RequestError
from inl.guidance.json_schemas import MAX_CHOICES
from inl.guidance.lark_text import literal
from inl.guidance.python_types import is_schema_class, type_schema
from inl.guidance.structural_tags import read_tag


class StructuredOutput(TypedDict, total=False):
    """What the output must match: exactly one of these fields, and ``after``."""

    json_schema: Mapping[str, Any] | bool | str
    """JSON that validates against this schema: a dict, a bool, or JSON text. ``{}`` is
    any JSON."""
    regex: str
    """Text that matches this regular expression as a whole."""
    lark: str
    """Text that this grammar in Lark's syntax derives from ``start``."""
    choice: Sequence[str]
    """One of these strings."""
    structural_tag: Mapping[str, Any]
    """Free text with parts that match JSON schemas: ``structures``, a list of dicts
    with ``begin``, ``schema`` and ``end``, and ``triggers``, a list of strings. Each
    ``begin`` begins with a trigger; text that contains a trigger goes on as a part."""
    after: str
    """The output begins with free text up to this one, and matches behind it, such as
    behind ``"</think>"`` where the prompt has begun the reasoning."""


class GrammarText(NamedTuple):
    """A grammar in one of the languages of :class:`StructuredOutput`."""

    kind: str
    text: str
    after: str = ""


def read_structured(value: Any, max_bytes: int) -> GrammarText:
    """Return the grammar of a ``structured`` option.

    max_bytes: maximum size of the text, in UTF-8. Raises
    :class:`~inl.errors.RequestError` for another form or a longer text.
    """
    accepted = ", ".join(_READERS)
    after = ""
    value = with_kind(value)
    if isinstance(value, Mapping) and "after" in value:
        after = _text("after", value["after"])
        value = {name: each for name, each in value.items() if name != "after"}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise RequestError(
            f"structured: found {value!r:.60}, accepts a dict with one of {accepted}, "
            "a JSON schema, or a dataclass or pydantic model"
        )
    ((kind, body),) = value.items()
    if kind not in _READERS:
        raise RequestError(f"structured: found {kind!r:.60}, accepts {accepted}")
    grammar = GrammarText(kind, _READERS[kind](body), after)
    try:
        size = len(grammar.text.encode()) + len(grammar.after.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured.{kind}: {error}; accepts text that UTF-8 can encode"
        ) from error
    if size > max_bytes:
        raise RequestError(
            f"structured.{kind}: found {size} bytes, accepts {max_bytes} "
            "(EngineConfig.max_grammar_bytes)"
        )
    return grammar


SCHEMA_WORDS = frozenset(
    {
        "$ref", "$defs", "type", "properties", "required", "enum", "const", "anyOf",
        "oneOf", "allOf", "items", "prefixItems", "pattern", "$schema",
    }
)  # fmt: skip
"""Keywords, one of which a JSON schema that is given without its kind has."""


def with_kind(value: Any) -> Any:
    """Return a JSON schema or a class as :class:`StructuredOutput`, others as they are.

    Raises :class:`~inl.errors.RequestError` for a class with other types than JSON has.
    """
    if is_schema_class(value):
        return {"json_schema": type_schema(value, "structured")}
    if isinstance(value, Mapping) and _is_schema(value):
        return {"json_schema": value}
    return value


def _is_schema(value: Mapping[str, Any]) -> bool:
    return not set(value) & set(_READERS) and not SCHEMA_WORDS.isdisjoint(value)


def _schema(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise _refused("json_schema", value, "a schema as a dict, a bool or JSON text")
    return _json(value, "structured.json_schema")


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{where}: {error}; accepts a schema that JSON can express"
        ) from error


def _text(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refused(kind, value, "a non-empty string")
    return value


def _choice(value: Any) -> str:
    strings = [] if isinstance(value, str | bytes | Mapping) else _items(value)
    if not strings or not all(isinstance(each, str) and each for each in strings):
        raise _refused("choice", value, "a list of non-empty strings")
    if len(strings) > MAX_CHOICES:
        raise RequestError(
            f"structured.choice: found {len(strings)} strings, accepts {MAX_CHOICES}"
        )
    # One terminal: alternatives of a rule are states of a parser, which are bounded.
    return f"start: TEXT\nTEXT: {' | '.join(map(literal, dict.fromkeys(strings)))}"


def _tag(value: Any) -> str:
    where = "structured.structural_tag"
    return _json(read_tag(value, where), where)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence | set | frozenset) else []


def _refused(kind: str, value: Any, accepted: str) -> RequestError:
    return RequestError(f"structured.{kind}: found {value!r:.60}, accepts {accepted}")


_READERS = {
    "json_schema": _schema,
    "regex": lambda value: _text("regex", value),
    "lark": lambda value: _text("lark", value),
    "choice": _choice,
    "structural_tag": _tag,
}
