"""Times the steps that a runner computes one after the other."""

from __future__ import annotations

from collections.abc import Callable


class StepTimer:
    """Measures the steps in flight, of which the oldest is being computed.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0
        """When the oldest step in flight became the oldest, or was planned."""

    def planned(self, *, is_first: bool) -> None:
        """Note that a step is submitted; is_first: no other one is in flight."""
        if is_first:
            self._since = self._clock()

    def collected(self) -> float:
        """Note that the oldest step is collected; returns the seconds it has taken."""
        before, self._since = self._since, self._clock()
        return self._since - before
