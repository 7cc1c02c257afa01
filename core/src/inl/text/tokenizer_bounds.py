"""Bounds of what a tokenizer.json may make of a text: its growth, and its settings.

A normalizer may replace each character by a long text, and a sequence of them
multiplies; a decoder likewise. The growth is computed from the rules, not measured.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from inl.bounded_json import parse_json
from inl.errors import CheckpointError

MAX_GROWTH: Final = 256
"""Limit of the bytes that a normalizer or decoder makes of one."""
MAX_PIECES: Final = 64
"""Limit of the tokens that a post-processor adds."""

UNICODE_GROWTH: Final = 11
"""NFKC makes 33 bytes of the 3 bytes of U+FDFA, the most of all characters."""


def check_rules(rules: Any, where: str) -> None:
    """Switch off truncation and padding; refuse rules that make texts too long.

    rules: a ``tokenizers.Tokenizer``. Raises :class:`CheckpointError`.
    """
    rules.no_truncation()
    rules.no_padding()
    for name in ("normalizer", "decoder"):
        growth = growth_of(_state(getattr(rules, name)))
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{where}: {name}: found rules that make up to {growth} bytes of one; "
                f"accepted: up to {MAX_GROWTH}"
            )
    added = added_tokens(_state(rules.post_processor))
    if added > MAX_PIECES:
        raise CheckpointError(
            f"{where}: post_processor: found {added} pieces; accepted: up to "
            f"{MAX_PIECES}"
        )


def growth_of(state: Any) -> int:
    """Return the largest number of bytes that a rule makes of one byte."""
    if not isinstance(state, Mapping):
        return 1
    kind = state.get("type")
    if kind == "Sequence":
        growth = 1
        for part in (*state.get("normalizers", ()), *state.get("decoders", ())):
            growth *= growth_of(part)
        return growth
    rule = GROWTH.get(str(kind))
    return rule(state) if rule else 1


def added_tokens(state: Any) -> int:
    """Return how many tokens and texts a post-processor puts together at most."""
    if not isinstance(state, Mapping):
        return 0
    inner = sum(map(added_tokens, state.get("processors", ())))
    ids = [
        len(token.get("ids", ()))
        for token in (state.get("special_tokens") or {}).values()
        if isinstance(token, Mapping)
    ]
    pieces = max(len(state.get("single", ())), len(state.get("pair", ())))
    return inner + pieces * max(ids, default=1)


def _state(part: Any) -> Any:
    return None if part is None else parse_json(part.__getstate__(), "rules")


def _bytes(text: Any) -> int:
    return len(str(text).encode("utf-8", "surrogatepass"))


def _replaced(state: Mapping[str, Any]) -> int:
    pattern, content = state.get("pattern"), _bytes(state.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not text:  # a regular expression, or nothing, may match between all characters
        return 1 + content
    return max(1, -(-content // _bytes(text)))


def _charsmap(state: Mapping[str, Any]) -> int:
    """Longest text in a SentencePiece table, which follows the trie, NUL-terminated."""
    table = base64.b64decode(state.get("precompiled_charsmap") or "")
    (size,) = struct.unpack_from("<I", table) if len(table) >= 4 else (0,)
    return max(UNICODE_GROWTH, *map(len, _texts(table[4 + size :])))


def _texts(blob: bytes) -> Iterator[bytes]:
    start = 0
    while start <= len(blob):
        stop = blob.find(b"\0", start)
        stop = len(blob) if stop < 0 else stop
        yield blob[start:stop]
        start = stop + 1


GROWTH: Final[Mapping[str, Callable[[Mapping[str, Any]], int]]] = {
    "Replace": _replaced,
    "Prepend": lambda state: 1 + _bytes(state.get("prepend", "")),
    "Metaspace": lambda state: 2 * _bytes(state.get("replacement", "")),
    "Precompiled": _charsmap,
    "NFKC": lambda _: UNICODE_GROWTH,
    "NFKD": lambda _: UNICODE_GROWTH,
    "NFC": lambda _: 3,
    "NFD": lambda _: 3,
    "BertNormalizer": lambda _: 3,
    "StripAccents": lambda _: 3,
    "Lowercase": lambda _: 2,
    "ByteLevel": lambda _: 2,
    "WordPiece": lambda state: 1 + _bytes(state.get("prefix", "")),
    "CTC": lambda state: 1 + _bytes(state.get("word_delimiter_token", "")),
    "BPEDecoder": lambda state: 1 + _bytes(state.get("suffix", "")),
}
"""Growth by the type of a rule; others do not make a text longer."""
