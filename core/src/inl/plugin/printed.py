"""What plugins print, which is no part of a command's output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TextIO

_lock = Lock()
_stdout: list[TextIO | None] = []
"""Standard output, once for each block that has replaced it."""


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to standard error what is printed; blocks of several threads may overlap.

    ``contextlib.redirect_stdout`` of two threads may leave the replacement.
    """
    with _lock:
        _stdout.append(_stdout[0] if _stdout else sys.stdout)
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        with _lock:
            own = _stdout.pop()
            if not _stdout:
                sys.stdout = own
