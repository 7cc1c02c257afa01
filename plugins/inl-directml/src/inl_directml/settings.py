"""Settings from environment variables; imports no framework."""

from __future__ import annotations

import os

from inl.errors import BackendUnavailable

VARIABLE = "INL_DIRECTML_PROVIDER"

INSTALL = {
    "dml": "pip install 'inl-directml[dml]'",
    "winml": "pip install 'inl-directml[winml]'",
    "webgpu": "pip install 'inl-directml[webgpu]'",
    "cpu": "pip install 'inl-directml[cpu]'",
    "torch": "pip install 'inl-directml[torch]'",
}
"""Execution providers that the backend runs on, the default one first, or "torch" for
torch-directml, and the command that installs what each needs."""


def provider() -> str:
    """Return the provider, ``INL_DIRECTML_PROVIDER``: "dml" if it is not set.

    Raises :class:`BackendUnavailable` for another value.
    """
    value = os.environ.get(VARIABLE) or next(iter(INSTALL))
    if value not in INSTALL:
        raise BackendUnavailable(
            f"environment variable {VARIABLE}: found {value!r:.80}, accepted: "
            f"{', '.join(INSTALL)}"
        )
    return value
