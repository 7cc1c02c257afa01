"""Sparse attention by an indexer, over the native layout of caches with one head.

Contexts are long where it is used, so that products of BLAS on a whole context take
most of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from inl.dtypes import decoded_e4m3
from inl.spec.kernel import Kernel
from inl_cpu.abi import Flag
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from inl.spec.step import Step
    from inl_cpu.command_emitter import CommandEmitter
    from inl_cpu.kernels.attention import NativeCache

LANES: Final = 16
"""Keys of a tile."""
ITEMS: Final = {int(Flag.X_EXACT): 1, int(Flag.KV_BF16): 2, int(Flag.KV_INT8): 4,
                int(Flag.KV_FLOAT8): 1}  # fmt: skip
"""Numbers of a lane that are side by side, by the flag of the cache's dtype."""
MOST: Final = 1 << 24
"""Numbers of an intermediate result of a part of the tokens, about."""


class Tiles:
    """The keys or the values of a cache of one head, by tiles."""

    def __init__(self, cache: NativeCache, *, values: bool) -> None:
        self._flags, self._values = cache.flags, values
        self._block_size = cache.block_size
        memory: NDArray[np.uint8] = plain(cache.v if values else cache.k)
        self._padded = -(-cache.head_dim // LANES) * LANES
        tiles = -(-cache.block_size // LANES)
        self._memory: NDArray[np.uint8] = memory.reshape(cache.blocks, tiles, -1)
        self._factor = 1.0
        if cache.scales is not None:
            self._factor = float(cache.scales[int(values)])

    def context(self, blocks: Any, lanes: int) -> NDArray[np.float32]:
        """Return the keys of blocks: [lanes, len(blocks) * block_size]."""
        group = ITEMS[self._flags]
        whole = -(-lanes // group) * group
        stored = self._codes()[blocks]
        parts = stored.reshape(*stored.shape[:2], -1, LANES, group)
        parts = parts[:, :, : whole // group]
        numbers = self._numbers(parts.transpose(2, 4, 0, 1, 3))
        if self._flags == Flag.KV_INT8:
            numbers = numbers * self._scales()[blocks]
        numbers = numbers.reshape(whole, len(blocks), -1)[:lanes]
        return numbers[..., : self._block_size].reshape(lanes, -1)

    def rows(self, blocks: Any, offsets: Any, width: int) -> NDArray[np.float32]:
        """Return the values of cells: [len(blocks), width]."""
        tile, lane = offsets // LANES, offsets % LANES
        group = ITEMS[self._flags]
        codes = self._codes()
        stored = codes.reshape(*codes.shape[:2], LANES // group, self._padded, group)
        found = self._numbers(stored[blocks, tile, lane // group, :width, lane % group])
        if self._flags == Flag.KV_INT8:
            found = found * self._scales()[blocks, tile, lane][:, None]
        return found

    def _codes(self) -> NDArray[Any]:
        """Return the numbers as they are stored, [blocks, tiles, padded * LANES]."""
        size = self._padded * LANES
        if self._flags == Flag.X_EXACT:
            return self._memory.view(np.float32)
        if self._flags == Flag.KV_BF16:
            return self._memory.view(np.uint16)
        return self._memory[..., :size]

    def _scales(self) -> NDArray[np.float32]:
        """Return the scales of an int8 cache, [blocks, tiles, LANES]."""
        return self._memory[..., -4 * LANES :].view(np.float32)

    def _numbers(self, codes: Any) -> NDArray[np.float32]:
        """Return codes as float32, those of int8 without their scales."""
        found: NDArray[np.float32]
        if self._flags == Flag.X_EXACT:
            found = np.ascontiguousarray(codes)
        elif self._flags == Flag.KV_INT8:
            found = codes.astype(np.float32) - 128
        elif self._flags == Flag.KV_BF16:
            found = (codes.astype(np.uint32) << 16).view(np.float32)
        else:
            found = FLOAT8[codes] * np.float32(self._factor)
        return found


FLOAT8: Final = decoded_e4m3(np.arange(256, dtype=np.uint8)).astype(np.float32)
"""The number of each code of float8_e4m3."""


def index_topk(
    emitter: CommandEmitter, q: Any, weights: Any, cache: NativeCache, step: Step, *,
    k: int, group: int, alone: bool = False,
) -> Any:  # fmt: skip
    """alone: whether each token is compared with its own context only."""
    ids = emitter.new((q.shape[0], k), "int32")
    tiles = Tiles(cache, values=False)
    given = [plain(x) for x in (q, weights, step.starts, step.lengths, step.positions)]
    table, out = plain(step.blocks)[group], plain(ids)

    def run() -> None:
        queries, factors, starts, lengths, positions = given
        out[:] = -1
        for row, (start, stop) in enumerate(pairwise(starts.tolist())):
            if stop == start:
                continue
            length = int(lengths[row])
            blocks = table[row, : -(-length // cache.block_size)]
            keys = tiles.context(blocks, queries.shape[2])[:, :length]
            most = 1 if alone else MOST // (queries.shape[1] * length)
            for part in _parts(start, stop, most):
                seen = keys[:, : int(positions[part].max()) + 1]
                scores = _scores(queries[part], factors[part], seen)
                _choose(scores, positions[part], out[part])

    emitter.python(run, [*given, plain(step.blocks)])
    return ids


def _parts(start: int, stop: int, most: int) -> Iterator[slice]:
    """Divide tokens into parts of ``most`` tokens, one at least."""
    size = max(1, most)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _scores(q: Any, weights: Any, keys: Any) -> Any:
    """Return the scores [T, n] of keys [d, n]."""
    tokens, heads, lanes = q.shape
    products = q.reshape(-1, lanes) @ keys
    np.maximum(products, 0, out=products)
    return (weights[:, None] @ products.reshape(tokens, heads, -1))[:, 0]


def _choose(scores: Any, positions: Any, out: Any) -> None:
    """Write the places of the highest scores [T, n] to ``out`` [T, k]."""
    for values, position, ids in zip(scores, positions, out, strict=True):
        seen, k = values[: position + 1], len(ids)
        if len(seen) <= k:
            ids[: len(seen)] = np.arange(len(seen))
        else:
            ids[:] = np.sort(np.argpartition(seen, len(seen) - k)[-k:])


def sparse_attention(
    emitter: CommandEmitter, q: Any, ids: Any, cache: NativeCache, step: Step, *,
    scale: float, group: int,
) -> Any:  # fmt: skip
    result = emitter.new(q.shape)
    tiles = Tiles(cache, values=True)
    given = [plain(x) for x in (q, ids, step.rows, step.used_counts)]
    table, out = plain(step.blocks)[group], plain(result)

    def run() -> None:
        queries, chosen, rows, used = given
        out[:] = 0
        for at in range(int(used[2])):
            places = chosen[at][chosen[at] >= 0]
            blocks = table[rows[at]][places // cache.block_size]
            latents = tiles.rows(blocks, places % cache.block_size, queries.shape[2])
            scores = queries[at] @ latents.T * np.float32(scale)
            shares = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
            shares /= shares.sum(-1, keepdims=True)
            np.matmul(shares, latents, out=out[at])

    emitter.python(run, [*given, plain(step.blocks)])
    return result


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """The choice of tokens, and attention over them."""
    yield Kernel("index_topk", "blas", partial(index_topk, emitter), preference=1)
    alone = partial(index_topk, emitter, alone=True)
    yield Kernel("index_topk", "blas_rows", alone, invariant=True)
    attend = partial(sparse_attention, emitter)
    yield Kernel("sparse_attention", "blas", attend, invariant=True)
