"""Writes to the paged cache on a TPU: one tile of a block at a time, in place.

A scatter of XLA moves the rows one by one, and for long prompts copies the whole cache.
Here a run of consecutive cells within a tile of a block, which is the least that can be
copied, is merged with the tile's other cells. The grid has as many runs as the step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.spec.kernel import Kernel
from inl_jax.pages import LANES, Pages, cells_of
from inl_jax.tensors import Array
from inl_jax.xla.kernel import inlined

TILE_BYTES = 32
"""Bytes of a column of a tile in HBM: 8 cells of 4 bytes, 16 of 2 or 32 of 1."""


class Runs(NamedTuple):
    """Tokens that are written to consecutive cells of one tile, [T] int32."""

    token: Array
    """First token."""
    block: Array
    """Block in the cache."""
    tile: Array
    """Tile of the block."""
    start: Array
    """First cell within the tile."""
    stop: Array
    """Cell after the last one."""
    again: Array
    """Whether the run before is in the same tile."""


def write_kv(
    k: Array, v: Array, cache: Pages, writes: Array, *, interpret: Any = False
) -> Pages:
    """The op ``write_kv`` on pages.

    Tokens of one block are adjacent. The cells of block 0, which belong to no sequence,
    are not written.
    """
    cells, scales = cells_of(k, v, cache)
    _, heads, page, lanes = cache.kv.shape
    tile = TILE_BYTES // cache.kv.dtype.itemsize
    runs, count = runs_of(writes, page, tile)
    wide = -(-len(writes) // tile) - 1, -(-len(writes) // LANES) - 1

    def window(offset: int) -> Any:
        def index(i: Any, runs: Runs) -> Any:
            return 0, jnp.minimum(runs.token[i] // tile + offset, wide[0]), 0

        return pl.BlockSpec((heads, tile, lanes), lambda i, *r: index(i, Runs(*r)))

    def scale_window(offset: int) -> Any:
        def index(i: Any, runs: Runs) -> Any:
            return 0, 0, jnp.minimum(runs.token[i] // LANES + offset, wide[1])

        return pl.BlockSpec((2, heads, LANES), lambda i, *r: index(i, Runs(*r)))

    def place(i: Any, *fields: Any) -> Any:
        runs = Runs(*fields)
        return runs.block[i], 0, runs.tile[i], 0

    rows = jnp.pad(cells.swapaxes(0, 1), ((0, 0), (0, -len(writes) % tile), (0, 0)))
    specs = [window(0), window(1)]
    inputs = [rows, rows]
    pages = in_hbm(cache, interpret)
    page_specs = [pl.BlockSpec((1, heads, tile, lanes), place)]
    if scales is not None and cache.scales is not None:
        scales = jnp.pad(scales.T, ((0, 0), (0, 0), (0, -len(writes) % LANES)))
        specs += [scale_window(0), scale_window(1)]
        inputs += [scales, scales]
        shape = (1, heads, cache.scales.shape[2])
        page_specs.append(pl.BlockSpec(shape, lambda i, *r: place(i, *r)[:3]))
    first = len(Runs._fields) + len(inputs)
    return Pages(
        *pl.pallas_call(
            partial(body, page, len(pages)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(Runs._fields),
                grid=(count,),
                in_specs=[*specs, *page_specs],
                out_specs=page_specs,
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
            input_output_aliases={first + i: i for i in range(len(pages))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=interpret,
            name="write_kv",
        )(*runs, *inputs, *pages)
    )


def in_hbm(cache: Pages, interpret: Any) -> list[Array]:
    """Return the arrays of a cache; XLA may not move them to VMEM.

    It does so as a whole where they are small, such as scales.
    """
    arrays = [each for each in cache if each is not None]
    if interpret:
        return arrays
    return [pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in arrays]


def runs_of(writes: Array, page: int, tile: int) -> tuple[Runs, Array]:
    """Return the runs of a step, and their number."""
    total = len(writes)
    after = jnp.concatenate([jnp.full(1, -2, writes.dtype), writes[:-1]])
    begins = (writes != after + 1) | (writes % tile == 0)
    (token,) = jnp.nonzero(begins & (writes >= page), size=total, fill_value=0)
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    (last,) = jnp.nonzero(ends & (writes >= page), size=total, fill_value=0)
    cell = writes[token]
    index = cell // tile
    again = index == jnp.concatenate([jnp.full(1, -1, index.dtype), index[:-1]])
    fields = (
        token, cell // page, index % (page // tile), cell % tile,
        cell % tile + last - token + 1, again,
    )  # fmt: skip
    count = (begins & (writes >= page)).sum(dtype=jnp.int32)
    # A step of padding alone has a run too, in block 0.
    return Runs(*(each.astype(jnp.int32) for each in fields)), jnp.maximum(count, 1)


def body(page: int, pages: int, *refs: Any) -> None:
    """Merge one run with its tile, and with the scales of its block."""
    count = len(Runs._fields)
    index = pl.program_id(0)
    runs = Runs(*(ref[index] for ref in refs[:count]))
    sources, old, out = (
        refs[count : -2 * pages],
        refs[-2 * pages : -pages],
        refs[-pages:],
    )

    @pl.when(runs.again == 0)
    def _() -> None:
        for before, after in zip(old, out, strict=True):
            after[...] = before[...]

    near, far, *scales = sources
    tile = near.shape[1]
    wide = jnp.int32 if near.dtype == jnp.int8 else jnp.float32
    cells = out[0][0].astype(wide)
    moved = runs.start - runs.token % tile
    new = shifted(near[...].astype(wide), far[...].astype(wide), moved, 1)
    place = jax.lax.broadcasted_iota(jnp.int32, cells.shape, 1)
    merged = jnp.where(
        (place >= runs.start) & (place < runs.stop), new[:, :tile], cells
    )
    out[0][0] = merged.astype(out[0].dtype)
    if not scales:
        return
    known = out[1][0]
    place = jax.lax.broadcasted_iota(jnp.int32, known.shape, 1)
    for part in range(2):
        start = part * page + runs.start
        window = shifted(
            scales[0][part], scales[1][part], start - runs.token % LANES, 1
        )
        here = (place >= start) & (place < start + runs.stop - runs.start)
        known = jnp.where(here, window[:, :LANES], known)
    out[1][0] = known


def shifted(near: Any, far: Any, places: Any, axis: int) -> Any:
    """Move two adjacent windows of 4 bytes per element along an axis."""
    both = jnp.concatenate([near, far], axis)
    size = both.shape[axis]
    return pltpu.roll(both, jax.lax.rem(places + size, size), axis)


def refuse(k: Any, _v: Any, cache: Any, _writes: Any) -> str | None:
    """Refuse what does not fill vector registers."""
    page, dim = cache.k.shape[1], k.shape[2]
    if 2 * dim % LANES:
        return f"head size {dim} is not a multiple of {LANES // 2}"
    if page != TILE_BYTES:
        return f"block size {page} is not {TILE_BYTES}"
    return None


def kernel(interpret: Any = False) -> Kernel:
    """Return the kernel; ``interpret`` simulates it on the CPU."""
    run = partial(inlined(write_kv), interpret=interpret)
    return Kernel("write_kv", "pallas", run, refuse, preference=10)
