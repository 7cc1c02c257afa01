"""The bytes of every token of a vocabulary, as grammars match them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.text.scored_bpe import SPACE
from inl.text.spelling import bytes_of
from inl.text.tokenizer import BYTE_TOKEN

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer


def vocabulary_bytes(tokenizer: Tokenizer, vocab: int) -> list[bytes]:
    """Return the bytes of tokens 0 to ``vocab - 1``; empty ones are never allowed.

    Special tokens and ids without a token are empty. Raises
    :class:`~inl.errors.RequestError` for a vocabulary that is neither byte-level nor
    of SentencePiece's kind.
    """
    spell = _spelling(tokenizer)
    special = tokenizer.special_ids
    tokens = (
        None if each in special else tokenizer.token(each) for each in range(vocab)
    )
    return [b"" if token is None else spell(token) for token in tokens]


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return the function from the spelling of a token to its bytes."""
    if tokenizer.byte_level:
        return bytes_of
    decoder = tokenizer.rules.decoder
    rules = (
        ""
        if decoder is None
        else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
    )
    if SPACE in rules:
        return _piece_bytes
    raise RequestError(
        f"structured: {tokenizer.where}: is neither byte-level nor of SentencePiece's "
        "kind; structured output accepts models with such a tokenizer"
    )


def _piece_bytes(token: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()
