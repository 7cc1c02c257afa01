"""The interval at which the interpreter switches between threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT_SECONDS = 0.005
"""CPython's own."""

SHORT_SECONDS = 0.0001
"""For a thread that steps a device beside busy ones: it leaves the interpreter several
times in a step, and waits for up to one interval each time."""


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Set the interval of this process, and restore it at the end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
