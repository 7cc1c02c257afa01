"""Describes how a child process ended, on POSIX and on Windows."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Final

FAULTS: Final = {
    0xC0000005: "access violation",
    0xC0000017: "no memory",
    0xC000001D: "illegal instruction",
    0xC00000FD: "stack overflow",
    0xC0000135: "a DLL is missing",
    0xC000013A: "Ctrl-C",
    0xC0000409: "abort",
}
"""NTSTATUS codes, which Windows reports as the exit status of a crash."""


def describe_exit(status: int) -> str:
    """Describe ``Popen.returncode``: negative for a signal, large for a Windows fault.

    Returns text that follows the name of the process: "ended with exit status 1".
    """
    if status < 0:
        return f"was killed by {signal_name(-status)} (signal {-status})"
    if status in FAULTS:
        return f"crashed with status {status:#x} ({FAULTS[status]})"
    return f"ended with exit status {status}"


def signal_name(number: int) -> str:
    """Name of a signal of this system."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return "an unknown signal"
