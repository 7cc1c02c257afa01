"""Checks JSON schemas before they are compiled, in linear time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from inl.bounded_json import parse_json
from inl.errors import RequestError

MAX_DEPTH: Final = 100
"""Levels of nesting of schemas, each of which is two or more levels of JSON."""

MAX_DEFINITIONS: Final = 1_000
MAX_PROPERTIES: Final = 3_000
MAX_CHOICES: Final = 10_000
"""Values of all enumerations, and strings of a choice."""

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"}
    | {"uuid", "uri"}
)
"""Values of "format" that constrain a string; others are annotations."""

MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions"}
    | {"dependentSchemas", "dependencies"}
)
"""Keywords whose members are schemas by any name."""

VALUES: Final = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords with values, which are no schemas."""


SPACES: Final = re.compile(r"[ \t\r\n]*[,:][ \t\r\n]*")
"""Separators of "x-guidance" that a schema may choose."""


class _Subschema(NamedTuple):
    fields: dict[str, Any]
    depth: int


def checked_schema(text: str, where: str) -> str:
    """Return a JSON schema as text, without formats that are annotations.

    where: prefix of error messages. Raises :class:`~inl.errors.RequestError` for text
    that is no JSON, and for a schema that exceeds a limit.
    """
    schema = parse_json(text, where)
    if check_schema(schema, where):
        return json.dumps(schema, ensure_ascii=False)
    return text


def check_schema(schema: Any, where: str) -> bool:
    """Check the limits of a schema, and delete formats that are annotations from it.

    Returns whether one was deleted. Raises as :func:`checked_schema`.
    """
    definitions = properties = choices = 0
    changed = False
    for fields, depth in _subschemas(schema):
        if depth > MAX_DEPTH:
            raise RequestError(
                f"{where}: found schemas nested over {MAX_DEPTH} levels deep (a "
                "recursion is written as a $ref), accepts fewer"
            )
        for name in ("$defs", "definitions"):
            definitions += _size(fields.get(name))
        for name in ("properties", "patternProperties"):
            properties += _size(fields.get(name))
        choices += _size(fields.get("enum"))
        _check_spaces(fields.get("x-guidance"), where)
        if isinstance(kind := fields.get("format"), str) and kind not in FORMATS:
            del fields["format"]
            changed = True
    counts = (
        (definitions, MAX_DEFINITIONS, "definitions"),
        (properties, MAX_PROPERTIES, "properties"),
        (choices, MAX_CHOICES, "values of enumerations"),
    )
    for found, most, name in counts:
        if found > most:
            raise RequestError(f"{where}: found {found} {name}, accepts {most}")
    return changed


def _check_spaces(options: Any, where: str) -> None:
    """Check the texts among options of the library, which are regular expressions.

    One that matches what may follow it as well forces a text without an end.
    """
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, str) and not SPACES.fullmatch(value):
            raise RequestError(
                f"{where}: found x-guidance.{name} {value!r:.40}, accepts a comma or a "
                "colon, and spaces around it"
            )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _subschemas(schema: Any) -> Iterator[_Subschema]:
    """Yield a schema and all within it; unknown keywords may contain schemas too."""
    waiting = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, list):
            waiting += [(each, depth) for each in value]
        elif isinstance(value, dict):
            yield _Subschema(value, depth)
            for key, part in value.items():
                if key in MAPS and isinstance(part, dict):
                    waiting += [(each, depth + 1) for each in part.values()]
                elif key not in VALUES:
                    waiting.append((part, depth + 1))


def as_resource(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a schema to be put into another one, whose references stay its own.

    References of a schema with an ``$id`` begin at it, wherever it stands. name: of the
    resource, unique in the other schema. A schema keeps an ``$id`` that it has. Its
    ``$schema`` is dropped: that of an older draft would ignore ``$id`` beside ``$ref``.
    """
    fields = {key: value for key, value in schema.items() if key != "$schema"}
    return {"$id": f"inl:{name}", **fields}
