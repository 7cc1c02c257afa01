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

    @property
    def longest_span(self) -> int:
        """Tokens of the longest span that one step computes as a whole; 0 for none."""

    def whole(self, position: int) -> int:
        """Return the last position up to this one that divides no span."""

    def digest(self, start: int, stop: int) -> bytes:
        """Return a digest of positions and contents; empty if there are none."""
