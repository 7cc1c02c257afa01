"""Ragged paged attention on a TPU: prompts and decoding rows in one launch.

The grid runs over tiles, each of up to ``Q`` consecutive tokens of one row.
:mod:`inl_jax.pallas.attention_tile` computes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_jax.pages import Pages
from inl_jax.pallas import block_sizes
from inl_jax.pallas.attention_scores import AHEAD, FEW_ROWS, LANES, QUERIES, Shape
from inl_jax.pallas.attention_tile import Ranges, body
from inl_jax.pallas.block_sizes import static
from inl_jax.pallas.write_kv import in_hbm
from inl_jax.tensors import Array
from inl_jax.xla.attention import Plan, plan, plan_of
from inl_jax.xla.kernel import inlined

NAME = "ragged_paged_attention"

LABEL = "attention/pallas"
"""Key of this kernel's plan in ``Step.plan``."""

KEYS = 512
"""Keys of a chunk."""

PROMPT_KEYS = 256
"""Keys of a chunk for tiles of many rows, which mask the last one."""

COLUMNS = 512
"""Queries of a block of scores."""

TILE = 256
"""Most tokens of a tile."""

TILES: Final[dict[str, Any]] = {"most": TILE, "unit": QUERIES}
"""Tiles of several tokens begin where a block of registers does."""

MOST_BEFORE = -(1 << 20)
"""Before the positions of all queries."""

ROWS = 1024
"""Rows of a key head that are computed at a time."""

VMEM_BYTES = 64 << 20
"""Memory that the compiler may use for buffers of this kernel."""


def attention(
    q: Array,
    cache: Pages,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    sizes: block_sizes.Sizes = (),
    interpret: Any = False,
) -> Array:
    """The op ``attention`` on pages.

    sizes: keys of a chunk and queries of a block of scores (``columns``), in place of
    those of the table.
    """
    tokens, heads, dim = q.shape
    _, kv_heads, page, _ = cache.kv.shape
    tiles = plan_of(step, LABEL, page, **TILES)
    size, share = tiles.tokens.shape[1], heads // kv_heads
    turned = size * share > FEW_ROWS
    lanes = 0 if dim % LANES == 0 else dim
    # Where a key and its value share a register, the lanes of the value are zero.
    padded = max(tokens + -tokens % QUERIES, size) - tokens if turned else 0
    q = jnp.pad(q, ((0, padded), (0, 0), (0, lanes)))
    queries = q.swapaxes(0, 1) if turned else tile_queries(q, tiles, kv_heads)
    name = shape_of(size * share, heads, kv_heads, dim, cache.kv.dtype)
    chosen = block_sizes.chosen(sizes, NAME, name)
    pages = chunk_pages(size * share, page, step.blocks.shape[-1], chosen)
    table = step.blocks[group]
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    shape = Shape(
        kv_heads,
        share,
        dim,
        pages,
        page,
        table.shape[1],
        size * (share // parts_of(size, share)) if turned else queries.shape[2],
        parts_of(size, share) if turned else 1,
        size,
        scale,
        window,
        cap,
        chosen.get("columns", COLUMNS),
    )
    out = launch(shape, queries, cache, table, tiles, interpret)
    if not turned:
        out = out[:, :, : size * share, -dim:]
        out = out.reshape(len(out), kv_heads, size, heads * dim // kv_heads)
    if not (turned and shape.split):
        out = out.swapaxes(1, 2)
    rows = out.reshape(len(out) * size, heads * dim)
    result = rows[tiles.tile * size + tiles.offset]
    result = jnp.where(tiles.used[:, None], result, 0)
    return result.reshape(tokens, heads, dim)


def parts_of(size: int, share: int) -> int:
    """Return the parts of a key head's queries in tiles of ``size`` tokens."""
    divisors = (each for each in range(1, share) if share % each == 0)
    return next((each for each in divisors if share // each * size <= ROWS), share)


def tile_queries(q: Array, tiles: Plan, heads: int) -> Array:
    """Gather queries by tile and key head: [N, kv_heads, rows, lanes].

    Row ``i * share + g`` is query head g of the tile's token i.
    """
    count, size = tiles.tokens.shape
    share, lanes = q.shape[1] // heads, q.shape[2]
    x = q[tiles.tokens].reshape(count, size, heads, share, lanes)
    x = x.swapaxes(1, 2).reshape(count, heads, size * share, lanes)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % QUERIES), (0, 0)))


def launch(
    shape: Shape, q: Array, cache: Pages, table: Array, tiles: Plan, interpret: Any
) -> Array:
    """Run the kernel over the tiles; returns [N, kv_heads, rows, lanes].

    For ``turned`` shapes, takes queries [heads, T, lanes] and returns [N, heads,
    tokens, dim], or [N, tokens, heads * dim] if they are ``split``.
    """
    count, heads, lanes = len(tiles.rows), shape.heads, q.shape[-1]
    queries = heads * shape.share
    result: tuple[int, ...]
    if shape.turned:
        result = (1, queries, shape.tokens, shape.dim)
        if shape.split:
            result = (1, shape.tokens, queries * shape.dim)
        block = pl.BlockSpec(
            (pl.Element(queries), pl.Element(shape.tokens), pl.Element(lanes)),
            lambda i, begin, *_: (0, pl.multiple_of(begin[i], QUERIES), 0),
        )
    else:
        result = (1, heads, shape.rows, lanes)
        block = pl.BlockSpec(result, lambda i, *_: (i, 0, 0, 0))
    begin = tiles.tokens[:, 0] // QUERIES * QUERIES
    ranges = chunk_ranges(shape, tiles)
    pages = in_hbm(cache, interpret)
    read = count * shape.table * sum(each.nbytes // len(each) for each in pages)
    pairs = count * shape.tokens * queries * shape.table * shape.page
    return pl.pallas_call(
        partial(body, shape, len(pages)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 + len(ranges),
            grid=(count,),
            in_specs=[
                block,
                *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in pages),
            ],
            out_specs=pl.BlockSpec(result, lambda i, *_: (i, *[0] * (len(result) - 1))),
            scratch_shapes=[
                *(
                    pltpu.VMEM((2, shape.pages, *each.shape[1:]), each.dtype)
                    for each in pages
                ),
                pltpu.SemaphoreType.DMA((2, shape.pages, len(pages))),
                pltpu.SMEM((1,), jnp.int32),
                *(pltpu.VMEM((2, heads, shape.keys), jnp.float32) for _ in pages[1:]),
                *(pltpu.VMEM(each, jnp.float32) for each in buffers(shape, lanes)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((count, *result[1:]), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * shape.dim,
            bytes_accessed=read,
            transcendentals=pairs,
        ),
        interpret=interpret,
        name=NAME,
    )(begin, tiles.rows, *ranges, table.reshape(-1), q, *pages)


def shape_of(rows: int, heads: int, kv_heads: int, dim: int, dtype: Any) -> str:
    """Name a shape in the table of block sizes; rows: of queries per key head."""
    kind = "decode" if rows <= FEW_ROWS else "prompt"
    return f"{kind}, {heads} heads, {kv_heads} of keys, {dim} wide, {dtype} cache"


def chunk_pages(rows: int, page: int, table: int, sizes: Mapping[str, int]) -> int:
    """Return the pages of a chunk for tiles of ``rows`` rows of queries per head."""
    keys = sizes.get("keys", KEYS if rows <= FEW_ROWS else PROMPT_KEYS)
    return max(1, min(keys // page, table))


def buffers(shape: Shape, lanes: int) -> list[tuple[int, ...]]:
    """Return the shapes of a tile's sums in float32, see :class:`Block`."""
    if not shape.turned:
        return [(shape.heads, shape.rows, each) for each in (LANES, LANES, lanes)]
    sums = [
        (shape.heads, shape.parts, each, shape.rows)
        for each in (1, shape.dim + QUERIES)
    ]
    return [*sums, (AHEAD + 1, shape.keys, min(shape.columns, shape.rows))]


def chunk_ranges(shape: Shape, tiles: Plan) -> Ranges:
    """Return the chunks of each tile. Padding has none."""
    positions, last = tiles.positions, tiles.positions.max(1)
    used = (last >= 0)[:, None]
    first = jnp.where(used & (positions < 0), last[:, None], positions).min(1)
    own = jnp.where(positions < 0, MOST_BEFORE, positions)
    before = jnp.where(used, own - jnp.arange(own.shape[1]), 0).max(1)
    start = inner = jnp.zeros_like(first)
    if shape.window is not None:
        start = jnp.maximum(first - shape.window + 1, 0) // shape.keys
        inner = jnp.maximum(last - shape.window + shape.keys, 0) // shape.keys
    stop = jnp.where(last < 0, start, last // shape.keys + 1)
    inner = jnp.clip(inner, start, stop)
    outer = jnp.clip((first + 1) // shape.keys, inner, stop)
    return Ranges(before, last, start, inner, outer, stop)


def refuse(q: Any, cache: Any, step: Any, **_: Any) -> str | None:  # noqa: ARG001
    """Refuse what does not fill vector registers, and tiles that do not fit."""
    page, dim = cache.k.shape[1], cache.k.shape[3]
    if 2 * dim % LANES:
        return f"head size {dim} is not a multiple of {LANES // 2}"
    if page % QUERIES:
        return f"block size {page} is not a multiple of {QUERIES}"
    rows = min(TILE, q.shape[0]) * q.shape[1]
    # Queries and results are buffered twice; most take 2 bytes, sums take 4.
    tile = rows * 4 * (3 * dim + QUERIES)
    if tile > VMEM_BYTES * 3 // 4:
        return f"{q.shape[1]} heads of size {dim} take {tile} bytes of VMEM for a tile"
    return None


def kernel(interpret: Any = False, config: Mapping[str, int] | None = None) -> Kernel:
    """Return the kernel; ``interpret`` simulates it on the CPU.

    config: block sizes, see :func:`attention`.
    """
    sizes = static(config or {})
    run = partial(attention, sizes=sizes, interpret=interpret)
    return Kernel(
        "attention",
        "pallas",
        run,
        refuse,
        plan=inlined(partial(plan, **TILES)),
        preference=10,
        config=dict(sizes),
    )
