"""Attention by a mask of blocks that visits the stored blocks only.

The grid runs over heads and visits: one for each block of keys that a block of queries
sees, in order of the queries. Sums are in float32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.errors import KernelError
from inl_jax.pallas.attention_scores import LANES, LOG2_E, product
from inl_jax.tensors import Array
from inl_jax.xla.attention import MASKED

BLOCK = 128
"""Default block, as that of :func:`inl.kernels.flash_attention`."""


class Visits(NamedTuple):
    """The visits of one head, [V] int32."""

    query: Any
    """Block of queries."""
    key: Any
    """Block of keys."""
    first: Any
    """Whether it is the first of the block of queries."""
    last: Any
    added: Any
    """0 for the visit of queries without blocks of keys, whose result is 0."""
    masked: Any
    """Whether some of the block's keys are not seen."""


class Shape(NamedTuple):
    """Static sizes of one launch."""

    block: int
    side: int
    """Queries and keys of a block with its padding."""
    keys: int
    offset: int
    """Position of the first query."""
    causal: bool
    scale: float


def block_sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    block_mask: Any,
    *,
    block_size: int = BLOCK,
    causal: bool = False,
    scale: float | None = None,
    interpret: Any = False,
) -> Array:
    """As :func:`inl.kernels.flash_attention` with a ``block_mask``, on a TPU.

    query: [..., L, d]. key: [..., S, d]. value: [..., S, e]. block_mask: booleans on
    the host [blocks of L, blocks of S]; blocks that are not set, or that causal queries
    do not see, are not read. Returns [..., L, e]. Sizes are padded to those of
    registers. Raises :class:`~inl.errors.KernelError` for a mask of another shape.
    """
    length, keys = query.shape[-2], key.shape[-2]
    side = block_size + -block_size % LANES
    counts = -(-length // block_size), -(-keys // block_size)
    mask = np.asarray(block_mask, bool)
    if mask.shape != counts:
        raise KernelError(
            f"block_sparse_attention: block_mask: found {list(mask.shape)}, accepted: "
            f"{list(counts)}, the blocks of queries and keys"
        )
    shape = Shape(
        block_size, side, keys, keys - length if causal else 0, causal,
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
    )  # fmt: skip
    visits = visits_of(mask, shape)
    operands = [padded(each, block_size, side) for each in (query, key, value)]
    heads, _, lanes = operands[0].shape
    wide = operands[2].shape[-1]
    out = pl.pallas_call(
        partial(body, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, visits.shape[1]),
            in_specs=[
                pl.BlockSpec((1, side, lanes), lambda h, i, v: (h, v[0, i], 0)),
                pl.BlockSpec((1, side, lanes), lambda h, i, v: (h, v[1, i], 0)),
                pl.BlockSpec((1, side, wide), lambda h, i, v: (h, v[1, i], 0)),
            ],
            out_specs=pl.BlockSpec((1, side, wide), lambda h, i, v: (h, v[0, i], 0)),
            scratch_shapes=[
                pltpu.VMEM((side, width), jnp.float32) for width in (LANES, LANES, wide)
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((heads, counts[0] * side, wide), query.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2),
        interpret=interpret,
        name="block_sparse_attention",
    )(jnp.asarray(visits), *operands)
    out = out.reshape(heads, counts[0], side, wide)[:, :, :block_size]
    out = out.reshape(heads, -1, wide)[:, :length, : value.shape[-1]]
    return out.reshape(*query.shape[:-1], value.shape[-1])


def padded(x: Array, block: int, side: int) -> Array:
    """Pad rows [..., L, d] to whole registers: [heads, blocks * side, lanes]."""
    length, dim = x.shape[-2:]
    x = jnp.pad(
        x.reshape(-1, length, dim),
        ((0, 0), (0, -length % block), (0, -dim % LANES)),
    )
    x = x.reshape(len(x), -1, block, x.shape[-1])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, side - block), (0, 0)))
    return x.reshape(len(x), -1, x.shape[-1])


def visits_of(mask: Any, shape: Shape) -> Any:
    """Return the visits of one head, in order of the queries: int32 [6, V]."""
    rows, columns = np.indices(mask.shape)
    first_key = columns * shape.block
    last_key = np.minimum(first_key + shape.block, shape.keys) - 1
    first_query = rows * shape.block + shape.offset
    seen = mask.copy()
    partly = (last_key - first_key + 1 < shape.side) & mask
    if shape.causal:
        seen &= first_key <= first_query + shape.block - 1
        partly |= last_key > first_query
    empty = ~seen.any(1)
    visited = seen.copy()
    visited[empty, 0] = True
    query, key = np.nonzero(visited)
    first = np.diff(query, prepend=-1) != 0
    last = np.diff(query, append=-1) != 0
    visits = Visits(
        query, key, first, last, seen[query, key], partly[query, key] & seen[query, key]
    )
    return np.stack(visits).astype(np.int32)


def body(shape: Shape, visits: Any, *refs: Any) -> None:
    """Add one block of keys to the sums of a block of queries."""
    q, k, v, out, top, total, sums = refs
    index = pl.program_id(1)
    visit = Visits(*(visits[i, index] for i in range(len(Visits._fields))))

    @pl.when(visit.first == 1)
    def _() -> None:
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    def add(masked: bool) -> None:
        scores = product(q[0], k[0], 1) * (shape.scale * LOG2_E)
        if masked:
            begin = visit.query * shape.block, visit.key * shape.block
            seen = seen_keys(shape, scores.shape, *begin)
            scores = jnp.where(seen, scores, MASKED)
        before = top[...]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        mass = jnp.exp2(scores - now[:, :1])
        if masked:
            # The maximum of a query that sees no key is the score of all.
            mass = jnp.where(seen, mass, 0)
        rescale = jnp.exp2(before - now)
        top[...] = now
        total[...] = total[...] * rescale + jnp.sum(mass, axis=1, keepdims=True)
        added = product(mass.astype(v.dtype), v[0], 0)
        sums[...] = sums[...] * rescale[:, :1] + added

    added, masked = visit.added == 1, visit.masked == 1
    pl.when(added & masked)(lambda: add(True))
    pl.when(added & jnp.logical_not(masked))(lambda: add(False))

    @pl.when(visit.last == 1)
    def _() -> None:
        weights = total[...][:, :1]
        result = sums[...] / jnp.where(weights > 0, weights, 1)
        out[0] = result.astype(out.dtype)


def seen_keys(shape: Shape, sizes: tuple[int, ...], query: Any, key: Any) -> Any:
    """Return the keys that queries of a block see, [queries, keys].

    query, key: the first ones of the blocks.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, sizes, 1)
    seen = (place < shape.block) & (key + place < shape.keys)
    if shape.causal:
        row = jax.lax.broadcasted_iota(jnp.int32, sizes, 0)
        seen &= key + place <= query + row + shape.offset
    return seen
