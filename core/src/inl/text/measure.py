"""Length of a text in tokens, bounded before the text is encoded as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inl.errors import PromptTooLong

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

PIECE: Final = 1 << 15
"""Characters that are encoded at a time."""
SLACK: Final = 2
"""Pieces may have more tokens than the whole text; never twice as many."""
TOKEN_CHARACTERS: Final = 512
"""Length of the longest token, as an upper bound."""


def check_length(tokenizer: Tokenizer, text: str, context: int) -> None:
    """Raise :class:`PromptTooLong` for a text that is far too long for a context.

    Takes time and memory for a few times the context, however long the text is. A text
    that passes may still be too long: encode it to know.
    """
    if len(text) <= PIECE:
        return
    if len(text) > TOKEN_CHARACTERS * context:
        _refuse(text, f"accepts at most {TOKEN_CHARACTERS * context}", context)
    count = 0
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        count += len(tokenizer.encode(piece, add_special=False))
        if count > SLACK * context:
            _refuse(text, f"over {count // SLACK} tokens", context)


def _refuse(text: str, found: str, context: int) -> None:
    raise PromptTooLong(
        f"prompt: found {len(text)} characters, {found}: the context holds {context} "
        "tokens, output included"
    )
