"""Validation of what decides when a request runs: key, priority and deadline."""

from __future__ import annotations

from math import isfinite
from typing import Any

from inl.errors import RequestError
from inl.scheduling.token_ids import read_integer

MAX_PRIORITY = 100
MAX_KEY = 256


def check_order(key: Any, priority: Any, deadline: Any) -> None:
    """Raise :class:`~inl.errors.RequestError` for a value that is not accepted."""
    if not isinstance(key, str) or len(key) > MAX_KEY:
        raise RequestError(
            f"key: found {key!r:.60}, accepts a string of up to {MAX_KEY} characters"
        )
    if isinstance(priority, bool):
        raise RequestError(f"priority: found {priority!r}, accepts an int")
    read_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if deadline is not None and not (is_number and isfinite(deadline)):
        raise RequestError(
            f"deadline: found {deadline!r:.60}, accepts None or a Unix time in "
            "seconds, such as time.time() + 30"
        )


def check_deadline(deadline: float | None, now: float) -> None:
    """Raise :class:`~inl.errors.RequestError` for a deadline that has passed."""
    if deadline is not None and deadline <= now:
        raise RequestError(
            f"deadline: found {deadline:.3f}, which passed {now - deadline:.3f} "
            "seconds ago, accepts a Unix time in the future, such as time.time() + 30"
        )
