"""Cleanup that an exception at any instruction does not skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ATTEMPTS = 5
"""Calls of a cleanup that exceptions interrupt again and again."""


def run_with_cleanup(work: Callable[[], T], cleanup: Callable[[], object]) -> T:
    """Return ``work()`` after a complete call of ``cleanup``, also if ``work`` raises.

    cleanup: must allow further calls, which follow if an exception interrupts one. A
    ``finally`` clause or ``__exit__`` alone is not enough: Ctrl-C may raise before its
    first instruction.
    """
    try:
        result = work()
        cleanup()
        return result
    except BaseException:
        _complete(cleanup)
        raise


def _complete(cleanup: Callable[[], object]) -> None:
    for left in reversed(range(ATTEMPTS)):
        try:
            cleanup()
            return
        except BaseException:
            if not left:
                raise
