"""How byte-level vocabularies spell bytes: GPT-2's letters."""

from __future__ import annotations

from typing import Final


def _letters() -> list[str]:
    """The letter of each byte: visible ones stand for themselves.

    The others are counted from U+0100 up.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [
        chr(byte if byte in visible else 256 + hidden.index(byte))
        for byte in range(256)
    ]


LETTERS: Final = _letters()
"""By byte."""

BYTES: Final = {letter: byte for byte, letter in enumerate(LETTERS)}
"""By letter."""


def bytes_of(token: str | None) -> bytes:
    """Bytes of a token, which is spelled as itself if it is not in these letters."""
    if token is None:
        return b""
    try:
        return bytes(map(BYTES.__getitem__, token))
    except KeyError:
        return token.encode()
