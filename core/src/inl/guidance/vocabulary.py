"""The bytes of every token of a vocabulary, as grammars match them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.guidance.token_bytes import TokenBytes
from inl.text.spelling import bytes_of
from inl.text.tokenizer import BYTE_TOKEN, SPACE

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

MARK = "\x01"
"""Put before a part of a text that the tokenizer takes for the beginning of one."""


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


def text_bytes(tokenizer: Tokenizer, vocab: int) -> list[bytes]:
    """Return as :func:`vocabulary_bytes`, and the bytes of special tokens too."""
    tokens = vocabulary_bytes(tokenizer, vocab)
    for each in tokenizer.special_ids:
        if each < vocab:
            tokens[each] = (tokenizer.token(each) or "").encode()
    return tokens


class Vocabulary(TokenBytes):
    """A tokenizer as ``llguidance`` reads it: the bytes of tokens, and an encoder.

    ends: the tokens that end an output, at least one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        special = [each for each in tokenizer.special_ids if each < vocab]
        super().__init__(vocabulary_bytes(tokenizer, vocab), special, ends)
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.tokens))

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Token of each byte string."""
        return {data: token for token, data in enumerate(self.tokens) if data}

    def __call__(self, text: str) -> list[int]:
        """Encode a part of a text into tokens with exactly its bytes."""
        data = text.encode()
        for mark in ("", MARK):
            ids = self._tokenizer.encode(mark + text, add_special=False, plain=True)
            start, left = 0, sum(len(self.tokens[each]) for each in ids) - len(data)
            while left > 0:  # a mark, and a space before the first word
                left -= len(self.tokens[ids[start]])
                start += 1
            if b"".join(self.tokens[each] for each in ids[start:]) == data:
                return ids[start:]
        return self._by_length(data)

    def _by_length(self, data: bytes) -> list[int]:
        """Encode bytes that the tokenizer changes, by the longest tokens."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            parts = (data[start:end] for end in ends)
            part = next((each for each in parts if each in self._ids), None)
            if part is None:
                break  # what remains is left to the library
            ids.append(self._ids[part])
            start += len(part)
        return ids


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return the function from the spelling of a token to its bytes."""
    if tokenizer.byte_level:
        return bytes_of
    if tokenizer.marks_spaces:
        return _piece_bytes
    raise RequestError(
        f"structured: {tokenizer.where}: is neither byte-level nor of SentencePiece's "
        "kind; structured output accepts models with such a tokenizer"
    )


def _piece_bytes(token: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()
