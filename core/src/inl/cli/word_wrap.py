"""Words that would cross the right edge of a terminal begin the next line."""

from __future__ import annotations

from unicodedata import combining, east_asian_width

LEAST_COLUMNS = 20
"""A narrower terminal breaks words itself."""


class WordWrap:
    """Changes the pieces of a streamed text for a terminal of ``columns``.

    A word is held back until it ends or has a line for itself, so that nothing that was
    shown is erased: an answer sends no control characters to a terminal.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns if columns >= LEAST_COLUMNS else 0
        self._column = 0
        self._word, self._cells = "", 0

    def __call__(self, piece: str) -> str:
        """Return what to write for the next piece."""
        return "".join(map(self._shown, piece)) if self._columns else piece

    def finish(self) -> str:
        """Return the word that is held back."""
        before = "\n" if self._column + self._cells > self._columns else ""
        word, cells = self._word, self._cells
        self._column = cells if before else self._column + cells
        self._word, self._cells = "", 0
        return before + word

    def _shown(self, letter: str) -> str:
        if letter == "\n":
            word, self._column = self.finish(), 0
            return word + letter
        if letter.isspace():
            word = self.finish()
            cells = 8 - self._column % 8 if letter == "\t" else 1
            if self._column + cells > self._columns:
                self._column = 0
                return f"{word}\n"  # in place of the space
            self._column += cells
            return word + letter
        wide = east_asian_width(letter) in "WF"
        cells = 0 if combining(letter) else 2 if wide else 1
        # Chinese and Japanese have no spaces, and break anywhere.
        full = wide or self._cells + cells > self._columns
        word = self.finish() if full else ""
        self._word, self._cells = self._word + letter, self._cells + cells
        return word + self.finish() if wide else word
