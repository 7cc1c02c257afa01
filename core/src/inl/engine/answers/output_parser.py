"""Splits generated text into content, reasoning and tool calls, as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from inl.engine.answers.conversation import Delta

if TYPE_CHECKING:
    from inl.engine.output_text import Span


class OutputParser(Protocol):
    """Parser of the text of one completion.

    sees_special: whether it is fed the text of special tokens too. end: characters, of
    all that were fed, behind which nothing more is read, so that the completion ends;
    ``None`` before.
    """

    sees_special: bool
    end: int | None

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was found."""

    @property
    def reasoning_end(self) -> int | None:
        """Characters up to the end of the reasoning and its mark, of all that were fed;
        0 if there is none, ``None`` while it lasts.
        """

    def feed(self, text: str, special: Sequence[Span] = ()) -> Delta:
        """Return the parts of the next text that are certain.

        special: places of special tokens in the text.
        """

    def finish(self) -> Delta:
        """Return the rest: no more text will follow."""


class PlainParser:
    """All text is content."""

    sees_special = has_calls = False
    reasoning_end: int | None = 0
    end: int | None = None

    def feed(self, text: str, special: Sequence[Span] = ()) -> Delta:
        """Return the text as content."""
        del special
        return Delta(content=text)

    def finish(self) -> Delta:
        """Return nothing."""
        return Delta()


PLAIN = PlainParser()
"""It has no state."""
