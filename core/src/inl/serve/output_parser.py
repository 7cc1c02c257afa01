"""Splits generated text into content, reasoning and tool calls, as it arrives."""

from __future__ import annotations

from typing import Protocol

from inl.serve.job import Delta


class OutputParser(Protocol):
    """Parser of the text of one completion."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was found."""

    @property
    def reasoning_end(self) -> int | None:
        """Characters up to the end of the reasoning and its mark, of all that were fed;
        0 if there is none, ``None`` while it lasts.
        """

    def feed(self, text: str) -> Delta:
        """Return the parts of the next text that are certain."""

    def finish(self) -> Delta:
        """Return the rest: no more text will follow."""


class PlainParser:
    """All text is content."""

    has_calls = False
    reasoning_end: int | None = 0

    def feed(self, text: str) -> Delta:
        """Return the text as content."""
        return Delta(content=text)

    def finish(self) -> Delta:
        """Return nothing."""
        return Delta()


PLAIN = PlainParser()
"""It has no state."""
