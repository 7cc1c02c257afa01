"""Cleanup that an exception at any instruction does not skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_with_cleanup(work: Callable[[], T], cleanup: Callable[[], object]) -> T:
    """Return ``work()`` after a complete call of ``cleanup``, also if ``work`` raises.

    cleanup: must allow a second call, which follows if an exception interrupts the
    first. A ``finally`` clause or ``__exit__`` alone is not enough: Ctrl-C may raise
    before its first instruction.
    """
    try:
        result = work()
        cleanup()
        return result
    except BaseException:
        cleanup()
        raise
