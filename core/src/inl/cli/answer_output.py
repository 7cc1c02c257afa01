"""Prints an answer while it is generated: wrapped on a terminal, as it is in a pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from unicodedata import combining, east_asian_width

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.request_handle import RequestHandle

CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Control characters removed from output to a terminal."""
FENCE = "```"
TAB = 8


def print_answer(
    engine: InferenceEngine,
    handle: RequestHandle,
    on_text: Callable[[str], None] = lambda _: None,
) -> None:
    """Print the answer of a submitted request while it is generated.

    on_text: called with each new piece of it. Raises the error of the request. An
    exception cancels it, and what it has generated stays printed.
    """
    columns = shutil.get_terminal_size().columns
    wrap = WordWrap(columns) if sys.stdout.isatty() else None
    try:
        while True:
            if text := handle.take():
                on_text(text)
                shown = wrap.feed(text.translate(CONTROL)) if wrap else text
                print(shown, end="", flush=True)
            if handle.completed:
                break
            engine.step()
        handle.completion()  # raises its error
    finally:
        engine.cancel(handle)
        if handle.finish_reason != "error":
            print(wrap.end() if wrap else "", flush=True)


def truncation(handle: RequestHandle, prompt_tokens: int, context: int) -> str | None:
    """Return the line that reports a truncated answer; ``None`` for a complete one.

    context: the tokens of prompt and answer that the model accepts.
    """
    if handle.finish_reason != "length":
        return None
    count = len(handle.token_ids)
    full = prompt_tokens + count >= context
    reason = f"the context of {context} is full" if full else "--max-tokens"
    return f"[stopped at {count} token{'s'[: count != 1]}; {reason}]"


class WordWrap:
    """Breaks lines between words instead of within them.

    A word is held back until it is complete. Lines of a code block are not changed.

    width: columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 1)
        self._column = 0
        """Columns that are printed of the line."""
        self._space = self._word = ""
        """Held back."""
        self._space_cells = self._word_cells = 0
        self._line = ""
        """Beginning of the line, as generated."""
        self._in_code = False

    def feed(self, text: str) -> str:
        """Return what can be printed after ``text``."""
        return "".join(map(self._add, text))

    def end(self) -> str:
        """Return the last word."""
        if not self._word:
            return ""
        code = self._in_code or self._line.lstrip().startswith(FENCE)
        column = self._column + self._space_cells + self._word_cells
        shown = self._space + self._word
        if self._column and column > self._width and not code:
            column, shown = self._word_cells, f"\n{self._word}"
        self._column = column
        self._hold_nothing()
        return shown

    def _add(self, letter: str) -> str:
        if letter == "\n":
            shown = self.end()
            self._in_code ^= self._line.lstrip().startswith(FENCE)
            self._column, self._line = 0, ""
            self._hold_nothing()
            return shown + letter
        if len(self._line) < self._width:
            self._line += letter
        if letter in " \t":
            shown = self.end()
            self._space += letter
            at = self._column + self._space_cells
            self._space_cells += TAB - at % TAB if letter == "\t" else 1
            return shown
        self._word += letter
        wide = east_asian_width(letter) in "WF"
        self._word_cells += 0 if combining(letter) else 1 + wide
        # Scripts of wide letters have no spaces; a word of a whole line has to break.
        return self.end() if wide or self._word_cells >= self._width else ""

    def _hold_nothing(self) -> None:
        self._space = self._word = ""
        self._space_cells = self._word_cells = 0
