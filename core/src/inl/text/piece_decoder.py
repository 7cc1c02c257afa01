"""Decoding of SentencePiece's tokens, which needs no merges."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from inl.text.plain_rules import MAX_ID
from inl.text.tokenizer import SPACE

BYTE: Final = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
"""Tokens that decode to a byte; the library also takes a sign and small letters."""


class PieceDecoder(NamedTuple):
    """Decodes as ``tokenizers`` does; ids without a token are dropped.

    strip: whether a text loses its first space.
    """

    tokens: Sequence[str]
    special: Collection[int]
    strip: bool

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Decode ids to text; raises :class:`OverflowError` for one above 2**32 - 1."""
        if any(not 0 <= index <= MAX_ID for index in ids):
            raise OverflowError("an id out of range")
        skipped = self.special if skip_special else ()
        known = (i for i in ids if i < len(self.tokens) and i not in skipped)
        text = "".join(_texts(self.tokens[index] for index in known))
        return text[1:] if self.strip and text.startswith(" ") else text


def _texts(tokens: Iterable[str]) -> Iterator[str]:
    """Yield the texts of tokens; bytes that are not UTF-8 become U+FFFD, each."""
    pending = bytearray()
    for token in tokens:
        text = token.replace(SPACE, " ")
        if byte := BYTE.fullmatch(text):
            pending.append(int(byte[1], 16))
            continue
        if pending:
            yield _text(pending)
            pending.clear()
        yield text
    if pending:
        yield _text(pending)


def _text(data: bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)
