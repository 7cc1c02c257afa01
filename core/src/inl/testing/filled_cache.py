"""Caches with known contents: random keys and values that ``write_kv`` has written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.backend.programs import compile_program, info_of
from inl.dtypes import E4M3, HostArray, cast, rounded, rounded_e4m3, widen, wrap
from inl.dtypes import decoded_e4m3 as decoded
from inl.executor.cache_transfers import CacheTransfers
from inl.executor.tracing import strict_state
from inl.spec.cache import KvScales, Paged
from inl.spec.cache_layout import BLOCKS as BLOCK_AXIS
from inl.spec.cache_layout import Parts, divided
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl.spec.strict_array import StrictArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inl.testing.target import Target

    Numbers = NDArray[np.float64]

BLOCKS = 20
"""Blocks of each group: more than one program copies."""

KEPT = 5
"""Tokens of the last block; the others are full."""

SCALES = KvScales(0.5, 2.0), KvScales(4.0, 0.25)
"""Constants of the layers in float8_e4m3: powers of two, which round nothing."""


class FilledCache(NamedTuple):
    """A state of two cache groups, one with a window."""

    transfers: CacheTransfers
    state: Any
    groups: tuple[Paged, ...]
    numbers: list[Numbers]
    """Keys and values of each group, [layers, 2, blocks, block_size, kv_heads,
    head_dim], rounded to the compute dtype; zeros where nothing was written."""

    @classmethod
    def made(
        cls, target: Target, dtype: str, kv_dtype: str, *seed: object
    ) -> FilledCache:
        """Fill the caches of a new state. Raises what the kernels raise."""
        size = target.backend.traits.block_size
        # With a bucket, as on devices whose programs copy 1 or 16 blocks.
        limits = Limits(
            slots=4, blocks=(BLOCKS, BLOCKS), block_size=size, max_blocks_per_seq=3,
            vocab=11, buckets=(Bucket(tokens=1, rows=1),), windows=(None, size),
        )  # fmt: skip
        scales = SCALES if kv_dtype == E4M3 else ()
        groups = (
            Paged((0, 2), 2, 16, kv_dtype, None, scales),
            Paged((1,), 1, 32, kv_dtype, size, scales[1:]),
        )
        backend, selection = target.backend, target.selection
        state = backend.state(groups, limits=limits)
        transfers = CacheTransfers(backend, selection, groups, limits, state)
        rng = target.rng("blocks", dtype, kv_dtype, *seed)
        numbers: list[Numbers] = []
        for group in groups if not transfers.refusal else ():
            shape = len(group.layers), 2, BLOCKS, size, group.kv_heads, group.head_dim
            values = rng.standard_normal(shape)
            values *= 2.0 ** rng.integers(-2, 3, shape[:-1])[..., None]
            values[:, :, 0] = values[:, :, -1, KEPT:] = 0
            numbers.append(rounded(values, dtype))
            state = _written(target, dtype, limits, groups, group, numbers[-1], state)
        return cls(transfers, state, groups, numbers)

    def read(self, group: int, ids: list[int]) -> Parts:
        """Return contents of blocks."""
        found = self.transfers.read(self.state, group, ids)
        return self.transfers.host(group, len(ids), found)

    def written(self, group: int, ids: list[int], parts: Parts) -> FilledCache:
        """Return the cache with other contents of blocks."""
        each: Sequence[Parts] = [parts]
        if self.transfers.writes_blocks:
            each = divided(parts, len(ids), BLOCK_AXIS)
        program, *arguments = self.transfers.write(group, ids, each)
        (state,) = program(*arguments, self.state)
        return self._replace(state=state)


def _written(
    target: Target, dtype: str, limits: Limits, groups: tuple[Paged, ...],
    group: Paged, numbers: Numbers, state: Any,
) -> Any:  # fmt: skip
    """Write the keys and values of a group, but not those of block 0."""
    backend, size = target.backend, limits.block_size
    count = (BLOCKS - 1) * size - max(size - KEPT, 0)
    positions = np.arange(size, size + count, dtype=np.int32)
    rows = numbers.reshape(*numbers.shape[:2], -1, *numbers.shape[4:])[:, :, positions]
    bucket = Bucket(tokens=16, rows=1)
    tracer = Tracer(target.selection, bucket, size)
    strict = strict_state(groups, limits)
    info = info_of("write_blocks", None, limits)._replace(consumes=(3,))
    for at, layer in enumerate(group.layers):
        one = StrictArray(rows.shape[2:], dtype)
        index = StrictArray(positions.shape, "int32")
        tracer.write_kv(one, one, strict.caches[layer], index)
        function = partial(_write_kv, ResolvedOps(tracer), layer)
        program = compile_program(backend, function, info)
        k, v = (backend.tensor(cast(part, dtype)) for part in rows[at])
        (state,) = program(k, v, backend.tensor(wrap(positions)), state)
    return state


def _write_kv(
    ops: Any, layer: int, k: Any, v: Any, writes: Any, state: Any
) -> tuple[Any]:
    caches = list(state.caches)
    caches[layer] = ops.write_kv(k, v, caches[layer], writes)
    return (state._replace(caches=tuple(caches)),)


def stored(numbers: Numbers, group: Paged, blocks: list[int]) -> Parts:
    """Return the contents that a cache of a group should have of blocks."""
    found = numbers[:, :, blocks]
    if group.dtype == "int8":
        scales = np.abs(found).max(-1).astype(np.float32) / np.float32(127)
        codes = np.rint(found / np.where(scales > 0, scales, 1)[..., None])
        return {"cells": wrap(codes.astype(np.int8)), "scales": wrap(scales)}
    if group.dtype != E4M3:
        return {"cells": cast(found, group.dtype)}
    from inl.dtypes import encoded_e4m3

    factors = np.array(group.scales, np.float32)
    bits = encoded_e4m3(rounded_e4m3(found / factors[:, :, None, None, None, None]))
    return {"cells": HostArray(bits, E4M3, bits.shape), "scales": wrap(factors)}


def numbers_of(parts: Parts) -> Numbers:
    """Return the keys and values of contents."""
    cells = parts["cells"]
    if cells.dtype == E4M3:
        factors = parts["scales"].data[:, :, None, None, None, None]
        return np.asarray(decoded(cells.data) * factors, np.float64)
    values = widen(cells).astype(np.float64)
    return values * parts["scales"].data[..., None] if "scales" in parts else values
