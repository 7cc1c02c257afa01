"""Ctrl-C that stops an answer at the border of a step, and leaves the engine whole."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from inl.engine.core import StepRecord

PATIENCE = 3
"""So many Ctrl-C during one answer end the program: a step may hang."""


class Interrupt:
    """While entered, Ctrl-C is noted, and :meth:`check` raises KeyboardInterrupt.

    Python raises it anywhere else, also between a cache that was given up and the one
    that takes its place.
    """

    def __init__(self) -> None:
        self.decode_steps = 0
        """Steps since it was entered that gave a further token of an answer."""
        self._count = 0
        self._before: Any = None

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed since it was entered."""
        return self._count > 0

    def __enter__(self) -> Self:
        self.decode_steps = self._count = 0
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def on_step(self, record: StepRecord) -> None:
        """Count a step of the engine, and stop after it if that was asked for."""
        self.decode_steps += record.decode_rows
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._count:
            raise KeyboardInterrupt

    def settle(self) -> None:
        """Raise KeyboardInterrupt again unless it came from here."""
        if not 0 < self._count < PATIENCE:
            raise KeyboardInterrupt

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= PATIENCE:
            raise KeyboardInterrupt
