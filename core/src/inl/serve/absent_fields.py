"""Removes members of a request that ask for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

Defaults = Mapping[str, Sequence[Any]]
"""Fields that are not supported, with the values that change nothing."""


def without_absent(value: Any, schema: type, defaults: Defaults) -> Any:
    """Return a decoded body without members that are null.

    Objects of any content, such as JSON schemas, keep theirs. defaults: members of the
    body itself that are removed too.
    """
    body = _without_nulls(value, _type_info(schema))
    if not isinstance(body, dict):
        return body
    return {
        name: item
        for name, item in body.items()
        if not any(_is_same(item, each) for each in defaults.get(name, ()))
    }


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def _without_nulls(value: Any, kind: msgspec.inspect.Type) -> Any:
    if isinstance(value, dict):
        fields = _fields(kind)
        if fields is None:
            return value
        return {
            name: _without_nulls(item, fields[name]) if name in fields else item
            for name, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        items = [each.item_type for each in _kinds(kind) if _is_list(each)]
        return [_without_nulls(item, items[0]) for item in value] if items else value
    return value


def _is_list(kind: msgspec.inspect.Type) -> bool:
    return isinstance(kind, msgspec.inspect.ListType)


def _kinds(kind: msgspec.inspect.Type) -> Iterator[Any]:
    if isinstance(kind, msgspec.inspect.Metadata):
        yield from _kinds(kind.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for each in kind.types:
            yield from _kinds(each)
    else:
        yield kind


@cache
def _type_info(schema: type) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(schema)


@cache
def _fields_of(schema: type) -> dict[str, msgspec.inspect.Type]:
    kind = _type_info(schema)
    assert isinstance(kind, msgspec.inspect.StructType), "of one"
    return {field.encode_name: field.type for field in kind.fields}


def _fields(kind: msgspec.inspect.Type) -> dict[str, msgspec.inspect.Type] | None:
    """Return the fields of an object; ``None`` if it has any members."""
    structs = [
        each for each in _kinds(kind) if isinstance(each, msgspec.inspect.StructType)
    ]
    return _fields_of(structs[0].cls) if structs else None
