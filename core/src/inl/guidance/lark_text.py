"""Texts in the syntax of Lark's grammars."""

from __future__ import annotations

import json
from typing import Final

DELETE: Final = "\x7f"
"""The character that JSON may contain as it is, and Lark's strings may not."""


def literal(text: str) -> str:
    """Return a text as a literal of a grammar; nothing for an empty one."""
    if not text:
        return ""
    if DELETE not in text:
        return json.dumps(text, ensure_ascii=False)
    return f"/{''.join(map(_escaped, text))}/"


def _escaped(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"
