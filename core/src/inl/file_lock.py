"""Locks between processes: ``flock`` of POSIX, ``LockFile`` of Windows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

POLL_SECONDS: Final = 0.02
"""Windows waits for a lock at most ten seconds at once, in steps of one."""


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock of a file, created if it is missing.

    The system releases the lock of a process that ends. Raises OSError, which is
    ``BlockingIOError`` if another one holds it and this one is not to ``wait``.
    """
    with path.open("ab") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            with _locked_byte(file.fileno(), wait=wait):
                yield
            return
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def _locked_byte(descriptor: int, *, wait: bool) -> Iterator[None]:
    """Lock the first byte, which need not exist."""
    import msvcrt

    windows: Any = msvcrt  # typed as empty on other systems

    def change(mode: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        windows.locking(descriptor, mode, 1)

    while True:
        try:
            change(windows.LK_NBLCK)
            break
        except PermissionError as error:  # another process holds it
            if not wait:
                raise BlockingIOError from error
            time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        change(windows.LK_UNLCK)
