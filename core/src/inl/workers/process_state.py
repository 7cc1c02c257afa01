"""Whether a process of this host is stopped, which its silence does not tell."""

from __future__ import annotations

from pathlib import Path

STOPPED_SECONDS = 0.3
"""How long a process is seen stopped before it is given up. Ctrl-Z and fg stop and
continue the processes of a terminal together, but not at the same instant."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; ``False`` where the system has no /proc.

    A process that a debugger has stopped is not.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    _, _, fields = status.rpartition(b")")  # the name before it may have any character
    return fields.split()[:1] == [b"T"]
