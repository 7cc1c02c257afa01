"""Selects the CPU backend, native or torch; imports no framework, for probes use it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, NamedTuple

from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl.plugin.environment import environment_choice
from inl.plugin.frameworks import require_framework
from inl_cpu.abi import ISAS
from inl_cpu.cores import count_threads
from inl_cpu.library import open_library, select_isa

REQUIREMENT: Final = "torch>=2.5"
TORCH: Final = "inl-cpu[torch]"
"""Has the backend that computes where the library cannot."""

VARIABLE: Final = "INL_CPU"
"""Environment variable: "native" or "torch". A requested backend never falls back."""


class Selection(NamedTuple):
    """The backend that computes on the CPU."""

    name: str
    """"native" or "torch"."""
    note: str
    """Short description for lists of devices."""


def select_backend() -> Selection:
    """Select the native library if it can be loaded, else torch.

    Raises :class:`BackendUnavailable` if neither is available, and
    :class:`DeviceError` for invalid environment variables.
    """
    requested = environment_choice(VARIABLE, ("", "native", "torch"))
    library, reason = open_library()
    if library is not None and requested != "torch":
        threads = count_threads()
        plural = "" if threads == 1 else "s"
        isa = ISAS[select_isa(library)]
        return Selection("native", f"native kernels, {isa}, {threads} thread{plural}")
    if requested == "native":
        raise BackendUnavailable(f"{VARIABLE}=native was requested: {reason}")
    if requested == "torch":
        reason = f"{VARIABLE}=torch was requested"
    if find_spec("inl_torch") is None or find_spec("torch") is None:
        install = install_command(TORCH)
        if requested == "torch":
            raise BackendUnavailable(
                f"{reason}, and torch is not installed; try: {install}"
            )
        raise BackendUnavailable(f"torch is not installed ({install}), and {reason}")
    try:
        require_framework(REQUIREMENT, install_command(TORCH))
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{reason}, and {error}") from error
    return Selection("torch", f"torch; {reason}")
