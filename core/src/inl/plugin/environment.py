"""Environment variables that configure backends; imports no framework."""

from __future__ import annotations

import os
from collections.abc import Sequence

from inl.errors import DeviceError

Settings = tuple[tuple[str, str], ...]
"""Names and values of environment variables, sorted."""


def settings() -> Settings:
    """Return the environment variables whose names start with ``INL_``."""
    found = (item for item in os.environ.items() if item[0].startswith("INL_"))
    return tuple(sorted(found))


def environment_choice(
    variable: str, accepted: Sequence[str], error: type[DeviceError] = DeviceError
) -> str:
    """Return the value of a variable; the first accepted one if it is unset or empty.

    Raises ``error`` for a value that is not accepted.
    """
    value = os.environ.get(variable, "") or accepted[0]
    if value not in accepted:
        raise error(
            f"environment variable {variable}: found {value!r:.80}, "
            f"accepted: {', '.join(filter(None, accepted))}"
        )
    return value
