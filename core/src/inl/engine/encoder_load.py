"""What an encoder has computed, and what waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class EncoderLoad:
    """Totals of an encoder's queue since the engine started.

    One thread at a time changes them; any may read.
    """

    waiting: Callable[[], int] = field(repr=False)
    """Returns the images or sequences that wait for a program."""
    device: str = ""
    """The device that computes."""
    programs: int = 0
    """Programs computed to their end."""
    inputs: int = 0
    """Images or sequences of these: ``inputs / programs`` is the mean batch size."""
    cache_hits: int = 0
    """Images whose features were kept from before."""
    seconds: float = 0.0
    """Time in programs, which of a device of its own is beside that of steps."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time of a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def computed(self, inputs: int) -> None:
        """Count a completed program and its images or sequences."""
        self.programs += 1
        self.inputs += inputs
