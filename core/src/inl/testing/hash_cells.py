"""Cache and arithmetic of :mod:`inl.testing.hash_runner`."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from inl.dtypes import HostArray
from inl.protocol.runner import Limits
from inl.spec.step import NEUTRAL, TOP, Scores
from inl.spec.uniforms import MASK, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.protocol.frame_decoder import StepRow
    from inl.spec.cache_layout import Parts
    from inl.spec.message import IntArray

HIDDEN, HIDDEN_RANGE = 8, 1 << 24
"""Elements of a hidden state, whole numbers from 1 that float32 holds."""

UNWRITTEN = 0xA5A5A5A5A5A5A5A5
"""Initial value of a cell; no token's value is above 2**63."""


class HashCells:
    """A paged cache with one number for each token, in every cache group."""

    def __init__(self, limits: Limits) -> None:
        self._size = limits.block_size
        self._windows = limits.windows or (None,) * limits.groups
        self._cells = [
            np.full((blocks, self._size), UNWRITTEN, np.uint64)
            for blocks in limits.blocks
        ]
        positions = range(limits.max_blocks_per_seq * self._size)
        self._weights = [
            np.array([mix((group << 32) + at) | 1 for at in positions], np.uint64)
            for group in range(limits.groups)
        ]

    def clear(self) -> None:
        """Forget all tokens."""
        for cells in self._cells:
            cells[:] = UNWRITTEN

    def copied(self, group: int, blocks: Sequence[int]) -> Parts:
        """Return the contents of blocks: halves of each number, as key and value."""
        words = self._cells[group][list(blocks)].view("<u4").astype(np.uint32)
        halves = words.reshape(len(blocks), self._size, 2).transpose(2, 0, 1)
        data = np.ascontiguousarray(halves[None, ..., None, None]).view(np.int32)
        return {"cells": HostArray(data, "int32", data.shape)}

    def overwrite(self, group: int, blocks: Sequence[int], parts: Parts) -> None:
        """Replace the contents of blocks by those of :meth:`copied`."""
        low, high = parts["cells"].data.view(np.uint32).astype(np.uint64)[0, ..., 0, 0]
        self._cells[group][list(blocks)] = low | (high << np.uint64(32))

    def write(
        self,
        tables: Sequence[NDArray[np.int64]],
        start: int,
        ids: Sequence[int],
        adapter: int,
    ) -> None:
        """Store ids at positions from ``start`` on, through the block tables.

        In a group with a window, values are mixed with those that the token sees.
        """
        values = np.array(ids, np.uint64) + np.uint64((adapter << 32) + 1)
        places = np.arange(start, start + len(ids))
        for group, (cells, table) in enumerate(zip(self._cells, tables, strict=True)):
            window, stored = self._windows[group], values
            if window is not None:
                stored = self._chained(group, table, window, start, values)
            cells[table[places // self._size], places % self._size] = stored

    def _chained(
        self,
        group: int,
        table: NDArray[np.int64],
        window: int,
        start: int,
        values: NDArray[np.uint64],
    ) -> NDArray[np.uint64]:
        """Return values that depend, as keys do, on all that their tokens have seen."""
        seen = deque(self._read(group, table, max(start - window + 1, 0), start))
        chained: list[int] = []
        for at, value in enumerate(values.tolist(), start=start):
            while len(seen) > window - 1:
                seen.popleft()
            chained.append(mix((value + sum(seen)) & MASK))
            seen.append(chained[-1] * int(self._weights[group][at]) & MASK)
        return np.array(chained, np.uint64)

    def _read(
        self, group: int, table: NDArray[np.int64], start: int, stop: int
    ) -> list[int]:
        """Return the weighted cells of positions from ``start`` to ``stop``."""
        places = np.arange(start, stop)
        cells = self._cells[group][table[places // self._size], places % self._size]
        weighted: list[int] = (cells * self._weights[group][places]).tolist()
        return weighted

    def total(self, tables: Sequence[NDArray[np.int64]], length: int) -> int:
        """Return the weighted sum of cells, read through the block tables.

        Positions are the first ``length``, or the last of those within the window.
        """
        blocks = -(-length // self._size)
        total = length
        for group, table in enumerate(tables):
            if (window := self._windows[group]) is not None:
                start = max(length - window, 0)
                total += sum(self._read(group, table, start, length))
                continue
            read = self._cells[group][table[:blocks]].reshape(-1)[:length]
            total += int(read @ self._weights[group][:length])
        return total & MASK


def adapter_value(digest: str) -> int:
    """Return the first 31 bits of sha256 of an adapter's digest, or 1 if they are 0."""
    return int.from_bytes(sha256(digest.encode()).digest()[:4], "big") >> 1 or 1


def embedding_id(row: NDArray[np.float32]) -> int:
    """Return 2**31 plus the first 30 bits of sha256 of a row of embeddings."""
    return 2**31 + (int.from_bytes(sha256(row.tobytes()).digest()[:4], "big") >> 2)


def with_embedded_ids(
    rows: list[StepRow], embeddings: Mapping[int, NDArray[np.float32]]
) -> list[StepRow]:
    """Return rows with the id of each embedding in place of its token."""
    if not embeddings:
        return rows
    ids = {at: embedding_id(row) for at, row in embeddings.items()}
    result, first = [], 0
    for row in rows:
        tokens = [ids.get(at, token) for at, token in enumerate(row.tokens, first)]
        result.append(row._replace(tokens=tokens))
        first += len(tokens)
    return result


def filtered_noise(
    params: Sequence[float], counts: Mapping[int, int], bias: Mapping[int, float]
) -> int:
    """Return a number that depends on all parameters, effective counts and biases.

    It is the sum modulo 2**64 of ``mix(tag * 2**32 + bits)``, with tag 1 + index and
    float32 bits for each parameter; for each token, tag 2**8 + token and its count
    (only if a penalty is not neutral), and tag 2**31 + token and the bits of its bias.
    """
    total = _sum((1 + index, _bits(value)) for index, value in enumerate(params))
    if tuple(params[4:]) != NEUTRAL[4:]:
        total += _sum((256 + token, count) for token, count in counts.items() if count)
    total += _sum(
        (2**31 + token, _bits(value)) for token, value in bias.items() if value
    )
    return total & MASK


def _sum(pairs: Iterable[tuple[int, int]]) -> int:
    return sum(mix((tag << 32) + bits) for tag, bits in pairs)


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def hidden_row(total: int) -> NDArray[np.float32]:
    """Return the hidden state [HIDDEN] of a sequence: hashes of its total."""
    words = [mix(total + at) % HIDDEN_RANGE + 1 for at in range(HIDDEN)]
    return np.array(words, np.float32)


def scores(tokens: IntArray, vocab: int) -> Scores:
    """Return synthetic scores: token t has -t / 4, and the top ids are t, t + 1, ..."""
    steps = np.arange(min(TOP, vocab))
    ids = ((tokens[:, None] + steps) % vocab).astype(np.int32)
    return Scores(
        chosen=(-tokens / 4).astype(np.float32),
        ids=ids,
        values=(-ids / 4).astype(np.float32),
    )


def allowed(words: IntArray, vocab: int) -> list[int]:
    """Return the tokens that one row of a mask allows, in order."""
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits[:vocab]).tolist()
    return tokens
