"""Runners that stop between two steps until a test lets them go on."""

from __future__ import annotations

import math
import threading

from inl.testing.hash_runner import HashRunner
from waiting import until


class StepGate:
    """Lets some steps end, and holds the others; used from any thread."""

    def __init__(self, steps=math.inf):
        self._changed = threading.Condition()
        self._left = steps
        self.is_held = threading.Event()
        """Set while a step waits."""

    def hold_after(self, steps):
        """Let so many steps end from now on, then hold the next one."""
        with self._changed:
            self._left = steps
            self.is_held.clear()
            self._changed.notify_all()

    def release(self):
        """Hold no step."""
        self.hold_after(math.inf)

    def pass_step(self):
        """Wait until a step may end; called by each step."""
        with self._changed:
            while not self._left:
                self.is_held.set()
                assert self._changed.wait(300), "nobody releases the step"
            self._left -= 1


def wait_submitted(engine, count):
    """Wait until so many calls are open that the background thread steps."""
    calls = engine._dispatcher.step_loop._open
    until(lambda: len(calls) == count)


class HeldRunner(HashRunner):
    """Computes steps while its gate is open."""

    def __init__(self, limits, **options):
        super().__init__(limits, **options)
        self.gate = StepGate()

    def collect(self):
        self.gate.pass_step()
        return super().collect()
