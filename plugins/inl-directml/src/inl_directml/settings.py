"""Settings from environment variables; imports no framework."""

from __future__ import annotations

import os

from inl.errors import BackendUnavailable

VARIABLE = "INL_DIRECTML_PROVIDER"

PROVIDERS = ("dml", "winml", "webgpu", "cpu")
"""Execution providers of ONNX Runtime that the backend runs on."""


def provider() -> str:
    """Return the provider, ``INL_DIRECTML_PROVIDER``: "dml" if it is not set.

    Raises :class:`BackendUnavailable` for another value.
    """
    value = os.environ.get(VARIABLE) or PROVIDERS[0]
    if value not in PROVIDERS:
        raise BackendUnavailable(
            f"environment variable {VARIABLE}: found {value!r:.80}, accepted: "
            f"{', '.join(PROVIDERS)}"
        )
    return value
