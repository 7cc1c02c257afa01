"""One tile of :mod:`inl_jax.pallas.paged_attention`, within the kernel.

A tile loops over chunks of its row's context: the pages of a chunk are copied from HBM
to one half of a buffer while the chunk in the other half is computed, across tiles as
well, so that short contexts keep the memory busy too. Chunks that all queries see whole
are computed without masks. Sums are in float32.

:mod:`inl_jax.pallas.attention_scores` computes a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl_jax.pallas.attention_scores import (
    FEW_TOKENS,
    Block,
    Bounds,
    Scales,
    Shape,
    accumulate,
    accumulate_turned,
)
from inl_jax.xla.attention import MASKED

HEADS = 4
"""Most heads that a loop computes together, so that their instructions overlap."""


class Ranges(NamedTuple):
    """Positions and chunks of each tile, [N] int32."""

    first: Any
    """Position of the first query; negative if it is of the row before, and without a
    meaning."""
    last: Any
    """Position of the last query; -1 for padding."""
    start: Any
    """First chunk."""
    inner: Any
    """First chunk that all queries see whole."""
    outer: Any
    """End of these."""
    stop: Any
    """End of the chunks."""


def body(shape: Shape, arrays: int, _begin: Any, rows: Any, *refs: Any) -> None:
    """One tile. ``half`` keeps the half of the buffers that is computed next.

    arrays: 2 if the cache has scales, else 1.
    """
    tile, tiles = pl.program_id(0), pl.num_programs(0)
    ranges = Ranges(*refs[: len(Ranges._fields)])
    table, q, *others = refs[len(Ranges._fields) :]
    caches, out, others = others[:arrays], others[arrays], others[arrays + 1 :]
    buffers, (arrived, half, *scratch) = others[:arrays], others[arrays:]
    scales, scratch = scratch[: arrays - 1], scratch[arrays - 1 :]
    sums, stage = (scratch[:-1], scratch[-1]) if shape.turned else (scratch, None)

    def copies(owner: Any, chunk: Any, place: Any) -> list[Any]:
        base = rows[owner] * shape.table + chunk * shape.pages
        return [
            pltpu.make_async_copy(
                cache.at[table[base + page]],
                buffer.at[place, page],
                arrived.at[place, page, index],
            )
            for page in range(shape.pages)
            for index, (cache, buffer) in enumerate(zip(caches, buffers, strict=True))
        ]

    def begin(owner: Any, chunk: Any, place: Any) -> None:
        for copy in copies(owner, chunk, place):
            copy.start()

    @pl.when(tile == 0)
    def _() -> None:
        half[0] = 0
        pl.when(ranges.stop[0] > 0)(lambda: begin(tile, ranges.start[0], 0))

    start, stop = ranges.start[tile], ranges.stop[tile]
    queries = ranges.last[tile] - ranges.first[tile] + 1
    over = partial(over_parts, shape, queries)
    after = jnp.minimum(tile + 1, tiles - 1)
    follows = (tile + 1 < tiles) & (ranges.stop[after] > ranges.start[after])

    def sums_of(head: Any, part: Any, column: int, width: int) -> list[Any]:
        if shape.turned:
            return [each.at[head, part, :, pl.ds(column, width)] for each in sums]
        return [each.at[head] for each in sums]

    def queries_of(head: Any, part: Any, tokens: int, column: int, width: int) -> Any:
        if not shape.turned:
            return q[0, head]
        first = head * shape.share + part * (shape.rows // shape.tokens)
        count = width // tokens
        found = q[pl.ds(first + column // tokens, count), :tokens]
        return found.reshape(width, found.shape[-1])

    @over
    def _(heads: Any, part: Any, tokens: int) -> None:
        for head in heads:
            highest, *others = sums_of(head, part, 0, rows_of(shape, tokens))
            highest[...] = jnp.full_like(highest, MASKED)
            for each in others:
                each[...] = jnp.zeros_like(each)

    def compute(masked: bool, chunk: Any, _carry: Any) -> None:
        place = half[0]
        ends = chunk + 1 == stop
        owner = jnp.where(ends, after, tile)
        upcoming = jnp.where(ends, ranges.start[after], chunk + 1)
        pl.when(jnp.logical_not(ends) | follows)(
            lambda: begin(owner, upcoming, 1 - place)
        )
        for copy in copies(tile, chunk, place):
            copy.wait()

        bounds = Bounds(ranges.first[tile], ranges.last[tile], chunk * shape.keys)
        for side_by_side in scales:
            arrange_scales(shape, buffers[1].at[place], side_by_side, masked, bounds)

        @over
        def _(heads: Any, part: Any, tokens: int) -> None:
            blocks = [
                Block(
                    queries_of(head, part, tokens, column, width),
                    buffers[0][place, :, head].reshape(shape.keys, 2 * shape.dim),
                    Scales(*(scales[0][i, pl.ds(head, 1)] for i in range(2)))
                    if scales
                    else None,
                    tokens,
                    sums_of(head, part, column, width),
                )
                for head in heads
                for column, width in columns(shape, rows_of(shape, tokens))
            ]
            if shape.turned:
                accumulate_turned(shape, blocks, masked, bounds, stage)
            else:
                for block in blocks:
                    accumulate(shape, block, masked, bounds)

        half[0] = 1 - place

    ends = [ranges.inner[tile]] if shape.window is not None else []
    ends += [ranges.outer[tile], stop]
    begins = [start, *ends[:-1]]
    for index, (low, high) in enumerate(zip(begins, ends, strict=True)):
        masked = index != len(ends) - 2
        jax.lax.fori_loop(low, high, partial(compute, masked), None)

    @over
    def _(heads: Any, part: Any, tokens: int) -> None:
        wide = rows_of(shape, tokens)
        for head in heads:
            _, *others = (ref[...] for ref in sums_of(head, part, 0, wide))
            if shape.turned:
                (values,) = others
                result = (values[: shape.dim] / values[shape.dim : shape.dim + 1]).T
                result = result.reshape(wide // tokens, tokens, shape.dim)
                store(shape, out, head * shape.share + part * len(result), result)
            else:
                total, values = others
                result = values / jnp.sum(total, axis=1, keepdims=True)
                out[0, head] = result.astype(out.dtype)


def store(shape: Shape, out: Any, head: Any, rows: Any) -> None:
    """Store rows [heads, tokens, dim] of query heads from ``head`` on."""
    count, tokens, dim = rows.shape
    rows = rows.astype(out.dtype)
    if not shape.split:
        out[0, pl.ds(head, count), :tokens] = rows
        return
    for index in range(count):
        lane = pl.multiple_of((head + index) * dim, dim)
        out[0, :tokens, pl.ds(lane, dim)] = rows[index]


def arrange_scales(
    shape: Shape, pages: Any, rows: Any, masked: bool, bounds: Bounds
) -> None:
    """Put the scales of a chunk's pages [pages, heads, lanes] side by side.

    rows: [2, heads, keys], of keys and of values.
    """
    for index in range(2):
        start = index * shape.page
        parts = [pages[i][:, start : start + shape.page] for i in range(shape.pages)]
        row = jnp.concatenate(parts, 1)
        if masked:
            key = bounds.offset + jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
            # As for the cells of a cache without scales.
            row = jnp.where(key <= bounds.last, row, 0)
        rows[index] = row


def columns(shape: Shape, rows: int) -> list[tuple[int, int]]:
    """Return the start and the number of queries of each block of scores."""
    most = shape.columns if shape.turned else rows
    return [(start, min(most, rows - start)) for start in range(0, rows, most)]


def heads_together(heads: int) -> int:
    """Return how many of the key heads a loop computes together."""
    return max(count for count in range(1, HEADS + 1) if heads % count == 0)


def rows_of(shape: Shape, tokens: int) -> int:
    """Return the rows of a part of which ``tokens`` of a tile are computed."""
    return shape.rows // shape.tokens * tokens if shape.turned else shape.rows


def over_parts(shape: Shape, used: Any, step: Any) -> None:
    """Call ``step(heads, part, tokens)`` for the parts of each head.

    used: tokens of the tile, from its first one to the last of its row.
    """
    if not shape.turned:
        for head in range(shape.heads):
            step([head], 0, shape.tokens)
        return
    together = heads_together(shape.heads)

    def loop(tokens: int, times: Any) -> None:
        @pl.loop(0, shape.heads // together * shape.parts * times)
        def _(index: Any) -> None:
            group = index // shape.parts
            heads = [group * together + i for i in range(together)]
            step(heads, index - group * shape.parts, tokens)

    if shape.tokens <= FEW_TOKENS:
        loop(shape.tokens, 1)
        return
    few = used <= FEW_TOKENS
    loop(FEW_TOKENS, jnp.where(few, 1, 0))
    loop(shape.tokens, jnp.where(few, 0, 1))
