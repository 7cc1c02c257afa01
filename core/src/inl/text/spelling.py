"""GPT-2's mapping between bytes and printable letters, for byte-level vocabularies."""

from __future__ import annotations

from typing import Final


def _letters() -> list[str]:
    """Return the letter of each byte: itself if visible, else from U+0100 up."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [
        chr(byte if byte in visible else 256 + hidden.index(byte))
        for byte in range(256)
    ]


LETTERS: Final = _letters()
"""Letter of each byte."""

BYTES: Final = {letter: byte for byte, letter in enumerate(LETTERS)}
"""Byte of each letter."""


def bytes_of(token: str | None) -> bytes:
    """Return the bytes of a token; its UTF-8 if it has other letters than these."""
    if token is None:
        return b""
    try:
        return bytes(map(BYTES.__getitem__, token))
    except KeyError:
        return token.encode()
