"""Settings from environment variables; imports no framework."""

from __future__ import annotations

from inl.errors import BackendUnavailable
from inl.plugin.environment import environment_choice

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
    return environment_choice(VARIABLE, tuple(INSTALL), BackendUnavailable)
