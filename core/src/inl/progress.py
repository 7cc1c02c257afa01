"""Progress reports while a model is loaded."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, final


class LoadStage(StrEnum):
    """A stage of loading; its value is the label that a progress bar shows."""

    LOADING = "loading weights"
    PACKING = "packing weights"
    COMPILING = "compiling programs"


class Progress(Protocol):
    """Callback for load progress.

    Called with ``done`` and ``total``, in bytes (in programs while compiling), and the
    stage that they count. Each stage starts over at a smaller ``done``.
    """

    def __call__(
        self, done: int, total: int, stage: LoadStage = LoadStage.LOADING, /
    ) -> None: ...


@final
class ProgressReporter:
    """Calls a progress callback, if there is one, with the current stage."""

    def __init__(self, callback: Progress | None = None) -> None:
        self.stage = LoadStage.LOADING
        """Stage of the reports that follow."""
        self._callback = callback

    def __call__(self, done: int, total: int) -> None:
        if self._callback is not None:
            self._callback(done, total, self.stage)
