"""Token masks: which tokens the rows of one step may sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from inl.spec.message import IntArray


class TokenMasks(NamedTuple):
    """Masks of the samples of one step; those not listed allow every token.

    A step has one sample per row, or per token if it verifies drafts.
    """

    step: int
    """Number of the step, as in its frame."""
    rows: tuple[int, ...]
    words: tuple[IntArray, ...]
    """int32 [ceil(V / 32)] of each listed row, see :func:`mask_words`."""

    def dense(self, samples: int, words: int) -> IntArray:
        """Return int32 [samples, words] for ``Runner.sample``."""
        masks = np.full((samples, words), -1, np.int32)
        for row, mask in zip(self.rows, self.words, strict=True):
            masks[row] = mask
        return masks


def mask_words(token_ids: Sequence[int], vocab: int) -> IntArray:
    """Return int32 [ceil(vocab / 32)] with bit ``t % 32`` of word ``t // 32`` set for
    each token t of ``token_ids``.
    """
    bits = np.zeros(mask_width(vocab) * 32, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    packed = np.packbits(bits, bitorder="little")
    return packed.view("<i4").astype(np.int32)


def mask_width(vocab: int) -> int:
    """Words of one row's mask."""
    return -(-vocab // 32)
