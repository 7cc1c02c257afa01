"""Settings from environment variables; imports no framework."""

from __future__ import annotations

from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl.plugin.environment import environment_choice

VARIABLE = "INL_DIRECTML_PROVIDER"

INSTALL = {
    "dml": install_command("inl-directml[dml]"),
    "winml": install_command("inl-directml[winml]"),
    "webgpu": install_command("inl-directml[webgpu]"),
    "cpu": install_command("inl-directml[cpu]"),
    "torch": install_command("inl-directml[torch]"),
}
"""Execution providers that the backend runs on, the default one first, or "torch" for
torch-directml, and the command that installs what each needs."""


def provider() -> str:
    """Return the provider, ``INL_DIRECTML_PROVIDER``: "dml" if it is not set.

    Raises :class:`BackendUnavailable` for another value.
    """
    return environment_choice(VARIABLE, tuple(INSTALL), BackendUnavailable)
