"""A vocabulary as ``llguidance`` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenBytes:
    """The bytes of every token, and an encoder by the longest tokens.

    tokens: empty ones are never allowed. special: ids of special tokens. ends: tokens
    that end the output, at least one.
    """

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.ends = ends
        self.eos_token_id = ends[0]
        self._compiled: Any = None

    def __call__(self, text: str) -> list[int]:
        """Encode a part of a text."""
        ids: list[int] = self._compiled.greedy_tokenize(text)
        return ids

    def compile(self, lib: Any) -> Any:
        """Return the vocabulary in the form of ``lib``, which is ``llguidance``."""
        self._compiled = lib.LLTokenizer(
            lib.TokenizerWrapper(self),
            n_vocab=len(self.tokens),
            eos_token=list(self.ends),
        )
        return self._compiled
