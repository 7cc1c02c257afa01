"""A request of a model, which operators can abort by its number."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inl.serve.generations import Generations


class OpenCall:
    """A request that was admitted and has not finished. Used by the event loop only."""

    def __init__(self, number: str) -> None:
        self.number = number
        self._generations: Generations | None = None
        self._is_aborted = False

    def begin(self, generations: Generations) -> None:
        """Set the completions, once the model is loaded."""
        self._generations = generations
        if self._is_aborted:
            generations.abort()

    def abort(self) -> None:
        """End the request with an error: now, or when its model is loaded."""
        self._is_aborted = True
        if self._generations is not None:
            self._generations.abort()
