"""Fields of values as JSON, between versions of inl-core that may have other fields.

A field that has its default is not sent, and one that is absent has its default. A
field that is not known is refused by its name: its value asks for something that this
side would not do. So two versions understand each other while neither uses a field that
the other lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from inl.errors import ProtocolError


def sent(value: Any) -> dict[str, Any]:
    """Return the fields of a NamedTuple or a dataclass that have no default value.

    Such values within it, also in tuples, are encoded in the same way.
    """
    defaults = defaults_of(type(value))
    fields = {name: getattr(value, name) for name in names_of(type(value))}
    return {
        name: _plain(field)
        for name, field in fields.items()
        if name not in defaults or field != defaults[name]
    }


def received(value: Any, kind: type, where: str) -> dict[str, Any]:
    """Return all fields of ``kind`` from the JSON form of :func:`sent`, not checked.

    Raises :class:`~inl.errors.ProtocolError`, which begins with ``where``, for another
    form, for a field that ``kind`` does not have, and for an absent one without a
    default.
    """
    names, defaults = names_of(kind), defaults_of(kind)
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: found {value!r:.60}, accepts an object")
    if unknown := sorted(map(str, value.keys() - set(names))):
        raise ProtocolError(
            f"{where}: found {unknown[0]!r:.60}, which this version does not know; "
            f"accepts {', '.join(names)}; install the same inl-core in both "
            "environments"
        )
    fields = {**defaults, **value}
    if absent := [name for name in names if name not in fields]:
        raise ProtocolError(f"{where}: found no {absent[0]}, which it needs")
    return fields


def names_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a NamedTuple or a dataclass, in order."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return names


def defaults_of(kind: type) -> Mapping[str, Any]:
    """Return the fields that have a default, with it."""
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        missing = dataclasses.MISSING
        return {f.name: f.default for f in fields if f.default is not missing}
    defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    return defaults


def _plain(value: Any) -> Any:
    if hasattr(value, "_fields") or dataclasses.is_dataclass(value):
        return sent(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
