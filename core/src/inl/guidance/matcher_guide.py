"""A guide of one request: a matcher of ``llguidance`` and its forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import RequestError
from inl.protocol.token_masks import mask_width

if TYPE_CHECKING:
    from inl.spec.message import IntArray


class MatcherGuide:
    """Implements :class:`~inl.scheduling.guide.Guide`.

    matcher: in its initial state, which it keeps. where: prefix of error messages.
    end_ids: tokens that end the output; the matcher allows them where it is complete.
    """

    def __init__(
        self, matcher: Any, where: str, vocab: int, end_ids: Sequence[int]
    ) -> None:
        self._initial = matcher
        self._where = where
        self._vocab = vocab
        self._end_ids = frozenset(end_ids)
        # Without end tokens, one behind the vocabulary stands for the end.
        self._words = mask_width(vocab if end_ids else vocab + 1)
        self.restart()

    def restart(self) -> None:
        self._matcher = self._initial.deep_copy()
        self._forced: list[int] = self._compute_forced()

    def copy(self) -> MatcherGuide:
        return MatcherGuide(
            self._initial, self._where, self._vocab, sorted(self._end_ids)
        )

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def forced(self) -> Sequence[int]:
        return self._forced

    def advance(self, token: int) -> None:
        self._consume(token)
        self._forced = self._after(self._forced)

    def masks(self, drafts: Sequence[int] = ()) -> IntArray:
        masks = np.zeros((len(drafts) + 1, self._words), np.int32)
        forced, row = self._forced, 0
        try:
            while True:
                self._fill(masks[row], forced)
                if row == len(drafts) or not self._continues(masks[row], drafts[row]):
                    break
                self._consume(drafts[row])
                row += 1
                if self.is_complete:
                    row -= 1
                    self._matcher.rollback(1)
                    break
                forced = self._after(forced)
        finally:
            if row:
                self._matcher.rollback(row)
        return masks[: row + 1, : mask_width(self._vocab)]

    def accepts(self, drafts: Sequence[int]) -> int:
        end = next((at for at, x in enumerate(drafts) if x in self._end_ids), None)
        known = list(drafts[:end])
        for at, (draft, forced) in enumerate(zip(known, self._forced, strict=False)):
            if draft != forced:
                return at
        count = int(self._matcher.validate_tokens(known)) if known else 0
        self._check()
        return count

    def _continues(self, mask: IntArray, token: int) -> bool:
        """Whether a draft is allowed and does not end the output."""
        allowed = 0 <= token < self._vocab and mask[token // 32] >> (token % 32) & 1
        return bool(allowed) and token not in self._end_ids

    def _after(self, forced: Sequence[int]) -> list[int]:
        """Return the forced tokens behind the first of ``forced``, or new ones."""
        return list(forced[1:]) or self._compute_forced()

    def _compute_forced(self) -> list[int]:
        return [] if self.is_complete else list(self._matcher.compute_ff_tokens())

    def _fill(self, mask: IntArray, forced: Sequence[int]) -> None:
        if forced:
            bit = np.uint32(1 << forced[0] % 32)
            mask.view(np.uint32)[forced[0] // 32] = bit
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def _consume(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._where}: {self._matcher.get_error():.300}")
