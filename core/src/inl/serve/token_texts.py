"""Texts of single tokens as they stand in a text, for log-probabilities."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenTexts(Protocol):
    """The texts of a model's tokens."""

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token within a text; empty for an unknown id."""

    def first(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text."""

    def is_special(self, token: int) -> bool:
        """Whether a token is special, and so no part of an answer's text."""


class NoTokenTexts:
    """No token has a text: before the model is known."""

    def __call__(self, token: int) -> bytes:
        del token
        return b""

    first = __call__

    def is_special(self, token: int) -> bool:
        """Return ``False``."""
        del token
        return False


class TokenPlaces:
    """Where the tokens of a text stand in it, as they arrive.

    A token of a part of a character stands where the character does. skip_special:
    whether the text is without special tokens.
    """

    def __init__(self, texts: TokenTexts, *, skip_special: bool = True) -> None:
        self.offset = 0
        """Characters so far."""
        self._texts = texts
        self._skip_special = skip_special
        self.begin()

    def begin(self) -> None:
        """Begin another text behind this one."""
        self._is_first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def is_shown(self, token: int) -> bool:
        """Whether a token is part of the text."""
        return not (self._skip_special and self._texts.is_special(token))

    def data(self, token: int) -> bytes:
        """Return the bytes that a token has, or would have, at this place."""
        is_first = self._is_first and not self._texts.is_special(token)
        return self._texts.first(token) if is_first else self._texts(token)

    def add(self, token: int, *, is_shown: bool | None = None) -> int:
        """Go on behind a token; returns its place in the text.

        is_shown: whether it is part of the text, if not as :meth:`is_shown`.
        """
        offset = self.offset
        if self.is_shown(token) if is_shown is None else is_shown:
            self.offset += len(self._decoder.decode(self.data(token)))
            self._is_first = self._is_first and self._texts.is_special(token)
        return offset


def token_name(data: bytes) -> str:
    r"""Return the text of a token; ``bytes:\xe2\x82`` for a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        letters = (
            chr(each) if 0x20 <= each < 0x7F and each != 0x5C else f"\\x{each:02x}"
            for each in data
        )
        return "bytes:" + "".join(letters)
