"""A runner that stops between two steps until a test lets it go on."""

from __future__ import annotations

import threading

from inl.testing.hash_runner import HashRunner


class HeldRunner(HashRunner):
    """Computes some steps, and the others once it may."""

    def __init__(self, limits, **options):
        super().__init__(limits, **options)
        self.hold_after(5)

    def hold_after(self, steps):
        """Compute so many steps from now on, then wait for ``may_step``."""
        self.steps_left = steps
        self.is_held, self.may_step = threading.Event(), threading.Event()

    def collect(self):
        if self.steps_left == 0:
            self.is_held.set()
            assert self.may_step.wait(300)
        else:
            self.steps_left -= 1
        return super().collect()
