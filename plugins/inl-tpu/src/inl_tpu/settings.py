"""Settings from environment variables; imports no framework."""

from __future__ import annotations

from inl.errors import BackendUnavailable
from inl.plugin.environment import environment_choice

VARIABLE = "INL_TPU_PLATFORM"

PLATFORMS = ("tpu", "cpu", "cuda")
"""JAX platforms that the backend runs on."""


def platform() -> str:
    """Return the JAX platform, ``INL_TPU_PLATFORM``: "tpu" if it is not set.

    Raises :class:`BackendUnavailable` for another value.
    """
    return environment_choice(VARIABLE, PLATFORMS, BackendUnavailable)
