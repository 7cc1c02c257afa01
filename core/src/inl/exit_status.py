"""Ends of child processes, on POSIX and on Windows: waiting for them, and their names.

A process may end while one that it has started holds its pipes, so no pipe is read to
its end without a time limit.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from subprocess import Popen

POLL_SECONDS: Final = 0.05
"""How often the end of a process is looked for while its pipes are open."""

PIPE_SECONDS: Final = 0.5
"""Time limit for the rest of the output of a process that has ended."""

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


def read_output(process: Popen[bytes], seconds: float) -> tuple[bytes, bytes, bool]:
    """Wait for a process; return its output, its errors, and whether it was killed.

    It is killed after ``seconds``. Whatever it has started in its process group, and
    holds its pipes, is killed when it has ended.
    """
    from subprocess import TimeoutExpired  # slow to import

    end = monotonic() + seconds
    while process.poll() is None and (left := end - monotonic()) > 0:
        with suppress(TimeoutExpired):
            output, errors = process.communicate(timeout=min(POLL_SECONDS, left))
            return output or b"", errors or b"", False
    is_late = process.poll() is None
    kill_group(process)
    rest: tuple[bytes | None, bytes | None]
    try:
        rest = process.communicate(timeout=PIPE_SECONDS)
    except TimeoutExpired as error:  # held by a process of another group
        rest = error.output, error.stderr
    return rest[0] or b"", rest[1] or b"", is_late


def kill_group(process: Popen[Any]) -> None:
    """Kill a process, and its process group if it leads one."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
