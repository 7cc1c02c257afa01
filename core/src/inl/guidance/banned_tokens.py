"""A guide that bans tokens: ends of an output that is too short, and phrases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from inl.protocol.token_masks import mask_words

if TYPE_CHECKING:
    from inl.spec.message import IntArray


class BannedTokens:
    """Implements :class:`~inl.scheduling.guide.Guide`.

    vocab: number of logits. min_tokens: length of the output below which ``end_ids``
    are banned. phrases: sequences of tokens, none empty, that the output never has.
    """

    is_complete = False
    forced: Sequence[int] = ()

    def __init__(
        self,
        vocab: int,
        *,
        min_tokens: int = 0,
        end_ids: Collection[int] = (),
        phrases: Collection[tuple[int, ...]] = (),
    ) -> None:
        self._vocab = vocab
        self._min_tokens = min_tokens
        self._end_ids = [token for token in end_ids if token < vocab]
        self._phrases = phrases
        self._tokens: list[int] = []
        self._all = mask_words(range(vocab), vocab)

    def restart(self) -> None:
        self._tokens = []

    def copy(self) -> BannedTokens:
        return BannedTokens(
            self._vocab,
            min_tokens=self._min_tokens,
            end_ids=self._end_ids,
            phrases=self._phrases,
        )

    def advance(self, token: int) -> None:
        self._tokens.append(token)

    def accepts(self, drafts: Sequence[int]) -> int:
        tokens = list(self._tokens)
        for count, draft in enumerate(drafts):
            if draft in self._banned_after(tokens):
                return count
            tokens.append(draft)
        return len(drafts)

    def masks(self, drafts: Sequence[int] = ()) -> IntArray:
        tokens, rows = list(self._tokens), []
        for draft in (*drafts, None):
            banned = self._banned_after(tokens)
            rows.append(self._all & ~mask_words(banned, self._vocab))
            if draft is None or draft in banned:
                break
            tokens.append(draft)
        return np.stack(rows)

    def _banned_after(self, tokens: Sequence[int]) -> list[int]:
        banned = list(self._end_ids) if len(tokens) < self._min_tokens else []
        for *begin, last in self._phrases:
            start = len(tokens) - len(begin)
            if start >= 0 and list(tokens[start:]) == begin:
                banned.append(last)
        return banned
