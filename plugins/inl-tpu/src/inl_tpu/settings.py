"""Settings from environment variables; imports no framework."""

from __future__ import annotations

import os

from inl.errors import BackendUnavailable

VARIABLE = "INL_TPU_PLATFORM"

PLATFORMS = ("tpu", "cpu", "cuda")
"""JAX platforms that the backend runs on."""


def platform() -> str:
    """Return the JAX platform, ``INL_TPU_PLATFORM``: "tpu" if it is not set.

    Raises :class:`BackendUnavailable` for another value.
    """
    value = os.environ.get(VARIABLE) or PLATFORMS[0]
    if value not in PLATFORMS:
        raise BackendUnavailable(
            f"environment variable {VARIABLE}: found {value!r:.80}, accepted: "
            f"{', '.join(PLATFORMS)}"
        )
    return value
