"""Which backend serves the CPU here; imports no framework, for the probe asks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final, NamedTuple

from inl.errors import BackendUnavailable, DeviceError
from inl_cpu.abi import ISAS
from inl_cpu.cores import count_threads
from inl_cpu.library import chosen_isa, open_library

VARIABLE: Final = "INL_CPU"
"""Environment variable: "native" or "torch"; what is asked for never falls back."""


class Choice(NamedTuple):
    """What computes on the CPU."""

    name: str
    """"native" or "torch"."""
    note: str
    """In a few words, for lists of devices."""


def choose() -> Choice:
    """The native library where it can be had, else torch.

    Raises :class:`BackendUnavailable` where neither is there, and
    :class:`DeviceError` for odd environment variables.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "native", "torch"):
        raise DeviceError(
            f"environment variable {VARIABLE}: found {asked!r:.80}, "
            "accepted: native, torch"
        )
    library, reason = open_library()
    if library is not None and asked != "torch":
        threads = count_threads()
        plural = "" if threads == 1 else "s"
        isa = ISAS[chosen_isa(library)]
        return Choice("native", f"native kernels, {isa}, {threads} thread{plural}")
    if asked == "native":
        raise BackendUnavailable(f"{VARIABLE}=native was asked for: {reason}")
    why = reason or f"{VARIABLE}=torch was asked for"
    if find_spec("inl_torch") is None or find_spec("torch") is None:
        raise BackendUnavailable(
            f"{why}, and torch is not installed; try: pip install inl-cpu[torch]"
        )
    return Choice("torch", f"torch; {why}")
