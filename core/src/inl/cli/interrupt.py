"""Ctrl-C handling that stops generation between steps and keeps the engine usable."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from inl.engine.records import StepRecord

PATIENCE = 3
"""Presses of Ctrl-C during one answer that end the program, in case a step hangs."""


class Interrupt:
    """Context manager that records Ctrl-C; :meth:`check` raises KeyboardInterrupt.

    The default handler raises at any bytecode, which can fall between consuming a
    cache and storing its replacement.
    """

    def __init__(self) -> None:
        self.decode_steps = 0
        """Decode steps since entry."""
        self._count = 0
        self._previous_handler: Any = None

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed since entry."""
        return self._count > 0

    def __enter__(self) -> Self:
        self.decode_steps = self._count = 0
        self._previous_handler = signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def on_step(self, record: StepRecord) -> None:
        """Count a step of the engine and raise if Ctrl-C was pressed during it."""
        self.decode_steps += record.decode_rows
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._count:
            raise KeyboardInterrupt

    def reraise_foreign(self) -> None:
        """Re-raise KeyboardInterrupt unless this object raised it."""
        if not 0 < self._count < PATIENCE:
            raise KeyboardInterrupt

    def _record(self, _signal: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= PATIENCE:
            raise KeyboardInterrupt
