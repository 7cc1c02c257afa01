"""Closes the objects of a JSON schema that is silent about additional properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inl.errors import RequestError
from inl.guidance.json_schemas import MAPS, MAX_DEPTH, VALUES

OPEN_KEYWORDS: Final = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties"}
)
"""Keywords by which a schema says itself which other properties an object may have."""

JOINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not"})
"""Keywords beside ``properties`` that add properties to the same object."""


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have the properties that it names, and no others.

    Such an object ends once each property is written, and none repeats. Objects that
    state ``additionalProperties``, that name no property, or that several schemas
    describe together, as ``allOf`` does, stay as they are. Raises
    :class:`~inl.errors.RequestError` for a schema nested too deep.
    """
    return _closed(schema, frozenset(_joined(schema)), "#", 1)


def _closed(value: Any, joined: frozenset[str], place: str, depth: int) -> Any:
    """Return a schema, or a list of schemas, with closed objects.

    joined: places that another schema adds properties to. place: of the value, as a
    reference.
    """
    if depth > 2 * MAX_DEPTH:
        raise RequestError(
            f"json_schema: found schemas nested over {MAX_DEPTH} levels deep, accepts "
            "fewer"
        )
    if isinstance(value, list):
        return [
            _closed(each, joined, f"{place}/{at}", depth + 1)
            for at, each in enumerate(value)
        ]
    if not isinstance(value, Mapping):
        return value
    fields = {
        key: part
        if key in VALUES
        else _closed_members(part, joined, f"{place}/{key}", depth + 1)
        if key in MAPS
        else _closed(part, joined, f"{place}/{key}", depth + 1)
        for key, part in value.items()
    }
    own = bool(fields.get("properties")) and not OPEN_KEYWORDS & fields.keys()
    if own and place not in joined and not JOINING & fields.keys():
        fields["additionalProperties"] = False
    return fields


def _closed_members(
    members: Any, joined: frozenset[str], place: str, depth: int
) -> Any:
    if not isinstance(members, Mapping):
        return members
    return {
        name: _closed(part, joined, f"{place}/{_escaped(name)}", depth)
        for name, part in members.items()
    }


def _joined(schema: Any) -> list[str]:
    """Return the places of schemas that describe an object together with another."""
    places: list[str] = []
    waiting = [(schema, "#")]
    while waiting:
        value, place = waiting.pop()
        if isinstance(value, list):
            waiting += [(each, f"{place}/{at}") for at, each in enumerate(value)]
        if not isinstance(value, Mapping):
            continue
        for key in JOINING & value.keys():
            part = value[key]
            alone = not value.get("properties") and (
                key in ("anyOf", "oneOf", "$ref") or _size(part) == 1
            )
            if not alone:
                places += _places(part, f"{place}/{key}")
        for key, part in value.items():
            if key not in VALUES:
                name = _escaped(key)
                waiting.append((part, f"{place}/{name}"))
    return places


def _places(part: Any, place: str) -> list[str]:
    """Return the places of the schemas of a keyword, references included."""
    if isinstance(part, str):
        return [part]
    if isinstance(part, list):
        return [
            each
            for at, item in enumerate(part)
            for each in _places(item, f"{place}/{at}")
        ]
    if isinstance(part, Mapping):
        reference = part.get("$ref")
        return [place, *([reference] if isinstance(reference, str) else [])]
    return []


def _size(part: Any) -> int:
    return len(part) if isinstance(part, list) else 0


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
