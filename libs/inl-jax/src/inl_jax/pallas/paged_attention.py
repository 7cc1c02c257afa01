"""Ragged paged attention on a TPU: prompts and decoding rows in one launch.

The grid runs over tiles, each of up to ``Q`` consecutive tokens of one row, as
:mod:`inl_jax.xla.attention` plans them. A tile loops over chunks of its row's context:
the pages of a chunk are copied from HBM to one half of a buffer while the chunk in the
other half is computed, across tiles as well, so that short contexts keep the memory
busy too. Sums are in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_jax.pages import Pages
from inl_jax.tensors import Array
from inl_jax.xla.attention import MASKED, Plan, plan, plan_of
from inl_jax.xla.kernel import inlined

LABEL = "attention/pallas"
"""Key of this kernel's plan in ``Step.plan``."""

LANES = 128
"""Width of a vector register."""

KEYS = 256
"""Keys of a chunk."""

QUERIES = 16
"""Rows of the query matrices are a multiple of this: the sublanes of bfloat16."""

VMEM_BYTES = 64 << 20
"""Memory that the compiler may use for buffers of this kernel."""


class Shape(NamedTuple):
    """Static sizes of one launch."""

    heads: int
    """Key heads."""
    share: int
    """Query heads of a key head."""
    dim: int
    pages: int
    """Pages of a chunk."""
    page: int
    """Tokens of a page."""
    table: int
    """Pages of a row's table, a multiple of ``pages``."""
    scale: float
    window: int | None
    cap: float | None

    @property
    def keys(self) -> int:
        """Keys of a chunk."""
        return self.pages * self.page

    @property
    def split(self) -> bool:
        """Whether keys and values are in different registers."""
        return self.dim % LANES == 0


def attention(
    q: Array,
    cache: Pages,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    interpret: Any = False,
) -> Array:
    tokens, heads, dim = q.shape
    _, kv_heads, page, _ = cache.kv.shape
    tiles = plan_of(step, LABEL, page)
    pages = max(1, min(KEYS // page, step.blocks.shape[-1]))
    table = step.blocks[group]
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    shape = Shape(
        kv_heads,
        heads // kv_heads,
        dim,
        pages,
        page,
        table.shape[1],
        scale,
        window,
        cap,
    )
    out = launch(
        shape, tile_queries(q, tiles, shape), cache.kv, table, tiles, interpret
    )
    size = tiles.tokens.shape[1]
    rows = out[:, :, : size * shape.share, : dim if shape.split else 2 * dim]
    rows = rows[..., -dim:].reshape(len(out), kv_heads, size, shape.share, dim)
    rows = rows.swapaxes(1, 2).reshape(len(out), size, heads, dim)
    result = jnp.where(tiles.used[:, None, None], rows[tiles.tile, tiles.offset], 0)
    return result.reshape(tokens, heads, dim)


def tile_queries(q: Array, tiles: Plan, shape: Shape) -> Array:
    """Gather queries by tile and key head: [N, kv_heads, rows, lanes].

    Row ``i * share + g`` is query head g of the tile's token i. Where a key and its
    value share a register, the lanes of the value are zero.
    """
    count, size = tiles.tokens.shape
    x = q[tiles.tokens].reshape(count, size, shape.heads, shape.share, shape.dim)
    x = x.swapaxes(1, 2).reshape(count, shape.heads, size * shape.share, shape.dim)
    lanes = 0 if shape.split else shape.dim
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % QUERIES), (0, lanes)))


def launch(
    shape: Shape, q: Array, kv: Array, table: Array, tiles: Plan, interpret: Any
) -> Array:
    """Run the kernel over the tiles; returns the shape of ``q``."""
    count, heads, rows, lanes = q.shape
    first = tiles.positions[:, 0]
    last = tiles.positions.max(1)
    start = jnp.zeros_like(first)
    if shape.window is not None:
        start = jnp.maximum(first - shape.window + 1, 0) // shape.keys
    stop = jnp.maximum(last, 0) // shape.keys + 1
    start = jnp.minimum(start, stop - 1)
    block = (1, heads, rows, lanes)
    itemsize = kv.dtype.itemsize
    read = count * shape.table * shape.page * heads * 2 * shape.dim * itemsize
    return pl.pallas_call(
        partial(body, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(count,),
            in_specs=[
                pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, shape.pages, *kv.shape[1:]), kv.dtype),
                pltpu.SemaphoreType.DMA((2, shape.pages)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, lanes), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * shape.table * shape.page,
            bytes_accessed=read,
            transcendentals=count * heads * rows * shape.table * shape.page,
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )(tiles.rows, first, last, start, stop, table.reshape(-1), q, kv)


def body(
    shape: Shape,
    rows: Any, first: Any, last: Any, start: Any, stop: Any, table: Any,
    q: Any, kv: Any, out: Any,
    buffer: Any, arrived: Any, half: Any, highest: Any, total: Any, sums: Any,
) -> None:  # fmt: skip
    """One tile. ``half`` keeps the half of the buffer that is computed next."""
    tile, tiles = pl.program_id(0), pl.num_programs(0)

    def copies(owner: Any, chunk: Any, place: Any) -> list[Any]:
        base = rows[owner] * shape.table + chunk * shape.pages
        return [
            pltpu.make_async_copy(
                kv.at[table[base + page]],
                buffer.at[place, page],
                arrived.at[place, page],
            )
            for page in range(shape.pages)
        ]

    def begin(owner: Any, chunk: Any, place: Any) -> None:
        for copy in copies(owner, chunk, place):
            copy.start()

    @pl.when(tile == 0)
    def _() -> None:
        half[0] = 0
        begin(tile, start[tile], 0)

    highest[...] = jnp.full_like(highest, MASKED)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)

    @pl.loop(start[tile], stop[tile])
    def _(chunk: Any) -> None:
        place = half[0]
        ends = chunk + 1 == stop[tile]

        @pl.when(jnp.logical_not(ends))
        def _() -> None:
            begin(tile, chunk + 1, 1 - place)

        @pl.when(ends & (tile + 1 < tiles))
        def _() -> None:
            begin(tile + 1, start[tile + 1], 1 - place)

        for copy in copies(tile, chunk, place):
            copy.wait()
        for head in range(shape.heads):
            accumulate(
                shape, q[0, head], buffer[place, :, head], chunk * shape.keys,
                first[tile], last[tile],
                highest.at[head], total.at[head], sums.at[head],
            )  # fmt: skip
        half[0] = 1 - place

    mass = total[:, :, :1]
    out[0] = (sums[...] / jnp.where(mass > 0, mass, 1)).astype(out.dtype)


def accumulate(
    shape: Shape, q: Any, cells: Any, offset: Any, first: Any, last: Any,
    highest: Any, total: Any, sums: Any,
) -> None:  # fmt: skip
    """Add a chunk of one head's cells to its maximum, sum and weighted values."""
    cells = cells.reshape(shape.keys, 2 * shape.dim)
    place = offset + jax.lax.broadcasted_iota(jnp.int32, cells.shape, 0)
    # A cell beyond the tile's last position may hold the NaN of an earlier request.
    cells = jnp.where(place <= last, cells, jnp.zeros_like(cells))
    keys, values = cells, cells
    if shape.split:
        keys, values = cells[:, : shape.dim], cells[:, shape.dim :]
    scores = product(q, keys, 1) * shape.scale
    if shape.cap is not None:
        scores = shape.cap * jnp.tanh(scores / shape.cap)
    query = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) // shape.share
    key = offset + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    distance = first + query - key
    seen = distance >= 0
    if shape.window is not None:
        seen &= distance < shape.window
    scores = jnp.where(seen, scores, MASKED)
    before = highest[:, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    mass = jnp.where(seen, jnp.exp(scores - now), 0)
    rescale = jnp.exp(before - now)
    added = jnp.sum(mass, axis=1, keepdims=True)
    highest[...] = jnp.broadcast_to(now, highest.shape)
    total[...] = total[...] * rescale + added
    sums[...] = sums[...] * rescale + product(mass.astype(values.dtype), values, 0)


def product(x: Any, y: Any, axis: int) -> Any:
    """Contract the last axis of ``x`` with ``axis`` of ``y``, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip


def refuse(q: Any, cache: Any, step: Any, **_: Any) -> str | None:  # noqa: ARG001
    """Refuse what does not fill vector registers."""
    page, dim = cache.k.shape[1], cache.k.shape[3]
    if 2 * dim % LANES:
        return f"head size {dim} is not a multiple of {LANES // 2}"
    if page % QUERIES:
        return f"block size {page} is not a multiple of {QUERIES}"
    return None


def kernel(interpret: Any = False) -> Kernel:
    """Return the kernel; ``interpret`` simulates it on the CPU."""
    run = partial(attention, interpret=interpret)
    return Kernel("attention", "pallas", run, refuse, plan=inlined(plan), preference=10)
