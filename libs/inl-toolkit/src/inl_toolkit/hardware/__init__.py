"""Devices of one kind, under the names of the documents that INL replaces."""

from __future__ import annotations

from inl.device import Device


def is_available(device_type: str) -> bool:
    """Return whether an installed backend can use the first device of a type."""
    return Device(device_type).is_available()
