"""The cache and the arithmetic of :mod:`inl.runtime.hash_runner`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from inl.runtime.runner import Limits
from inl.runtime.uniforms import MASK, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.spec.message import IntArray

UNWRITTEN = 0xA5A5A5A5A5A5A5A5
"""What a cell holds before its first token; no token's value is above 2**63."""


class HashCells:
    """A paged cache of numbers, one for each token, in every cache group."""

    def __init__(self, limits: Limits) -> None:
        self._size = limits.block_size
        self._cells = [
            np.full((blocks, self._size), UNWRITTEN, np.uint64)
            for blocks in limits.blocks
        ]
        positions = range(limits.width * self._size)
        self._weights = [
            np.array([mix((group << 32) + at) | 1 for at in positions], np.uint64)
            for group in range(limits.groups)
        ]

    def write(
        self,
        tables: Sequence[NDArray[np.int64]],
        start: int,
        ids: Sequence[int],
        adapter: int,
    ) -> None:
        """Store ids at positions from ``start`` on, through the block tables."""
        values = np.array(ids, np.uint64) + np.uint64((adapter << 32) + 1)
        places = np.arange(start, start + len(ids))
        for cells, table in zip(self._cells, tables, strict=True):
            cells[table[places // self._size], places % self._size] = values

    def total(self, tables: Sequence[NDArray[np.int64]], length: int) -> int:
        """Read ``length`` positions through the block tables and sum them, weighted."""
        blocks = -(-length // self._size)
        total = length
        for cells, weights, table in zip(
            self._cells, self._weights, tables, strict=True
        ):
            read = cells[table[:blocks]].reshape(-1)[:length]
            total += int(read @ weights[:length])
        return total & MASK


def allowed(words: IntArray, vocab: int) -> list[int]:
    """Return the tokens that one row of a mask allows, in order."""
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits[:vocab]).tolist()
    return tokens
