"""The interface of embeddings that stand for tokens of a prompt."""

from __future__ import annotations

from typing import Protocol


class EmbeddedPositions(Protocol):
    """Where a prompt has embeddings, and which: the rows themselves are the engine's.

    Token ids at these positions are placeholders.
    """

    @property
    def width(self) -> int:
        """H: elements of a row."""

    def __contains__(self, position: int, /) -> bool:
        """Whether there is an embedding at a position of the prompt."""

    @property
    def moves(self) -> bool:
        """Whether tokens, generated ones too, have positions along axes that each step
        carries: such a step neither verifies drafts nor repeats.
        """

    def digest(self, start: int, stop: int) -> bytes:
        """Return a digest of positions and contents; empty if there are none."""
