"""One tile of :mod:`inl_jax.pallas.paged_attention`, within the kernel.

A tile loops over chunks of its row's context: the pages of a chunk are copied from HBM
to one half of a buffer while the chunk in the other half is computed, across tiles as
well, so that short contexts keep the memory busy too. Chunks that all queries see whole
are computed without masks. Sums are in float32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl_jax.xla.attention import MASKED

LANES = 128
"""Width of a vector register."""

QUERIES = 16
"""Rows of the query matrices are a multiple of this: the sublanes of bfloat16."""

HEADS = 2
"""Heads that a loop computes together, so that their instructions overlap."""

FEW_ROWS = 64
"""Rows that a tile with a few queries computes. With as few at most, the loop over
heads is unrolled."""

LOG2_E = 1.4426950408889634


class Ranges(NamedTuple):
    """Positions and chunks of each tile, [N] int32."""

    first: Any
    """Position of the first query."""
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
    rows: int
    """Rows of a head's queries that are computed at a time."""
    parts: int
    """Most times that they are."""
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


def body(shape: Shape, rows: Any, *refs: Any) -> None:
    """One tile. ``half`` keeps the half of the buffer that is computed next."""
    tile, tiles = pl.program_id(0), pl.num_programs(0)
    ranges = Ranges(*refs[: len(Ranges._fields)])
    table, q, kv, out, buffer, arrived, half, *sums = refs[len(Ranges._fields) :]

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
        pl.when(ranges.stop[0] > 0)(lambda: begin(tile, ranges.start[0], 0))

    start, stop = ranges.start[tile], ranges.stop[tile]
    queries = ranges.last[tile] - ranges.first[tile] + 1
    over = partial(over_parts, shape, queries * shape.share)
    after = jnp.minimum(tile + 1, tiles - 1)
    follows = (tile + 1 < tiles) & (ranges.stop[after] > ranges.start[after])

    @over
    def _(head: Any, part: Any) -> None:
        highest, total, values = (each.at[head, part] for each in sums)
        highest[...] = jnp.full_like(highest, MASKED)
        total[...] = jnp.zeros_like(total)
        values[...] = jnp.zeros_like(values)

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

        @over
        def _(head: Any, part: Any) -> None:
            cells = buffer[place, :, head].reshape(shape.keys, 2 * shape.dim)
            accumulate(
                shape, q[0, head, part], cells, masked,
                (ranges.first[tile], ranges.last[tile], part.start, chunk * shape.keys),
                *(each.at[head, part] for each in sums),
            )  # fmt: skip

        half[0] = 1 - place

    ends = [ranges.inner[tile]] if shape.window is not None else []
    ends += [ranges.outer[tile], stop]
    begins = [start, *ends[:-1]]
    for index, (low, high) in enumerate(zip(begins, ends, strict=True)):
        masked = index != len(ends) - 2
        jax.lax.fori_loop(low, high, partial(compute, masked), None)

    @over
    def _(head: Any, part: Any) -> None:
        _, total, values = (each[head, part] for each in sums)
        mass = jnp.sum(total, axis=1, keepdims=True)
        out[0, head, part] = (values / mass).astype(out.dtype)


def over_parts(shape: Shape, used: Any, step: Any) -> None:
    """Call ``step(head, rows)`` for the parts of each head with ``used`` rows."""
    if shape.rows <= FEW_ROWS:
        for head in range(shape.heads):
            step(head, pl.ds(0, shape.rows))
        return
    few = used <= FEW_ROWS
    parts = jnp.minimum(pl.cdiv(used, shape.rows), shape.parts)
    together = math.gcd(shape.heads, HEADS)

    def loop(rows: int, parts: Any) -> None:
        @pl.loop(0, shape.heads // together * parts)
        def _(index: Any) -> None:
            group = index // jnp.maximum(parts, 1)
            start = pl.multiple_of((index - group * parts) * rows, rows)
            for head in range(together):
                step(group * together + head, pl.ds(start, rows))

    loop(FEW_ROWS, jnp.where(few, 1, 0))
    loop(shape.rows, jnp.where(few, 0, parts))


def accumulate(
    shape: Shape, q: Any, cells: Any, masked: bool, places: Any,
    highest: Any, total: Any, sums: Any,
) -> None:  # fmt: skip
    """Add a chunk of one head's cells to its maximum, sum and weighted values.

    places: positions of the first and the last query, the first row, the first key.
    The sums of the 128 lanes of ``total`` are added at the end.
    """
    first, last, row, offset = places
    if masked:
        place = offset + jax.lax.broadcasted_iota(jnp.int32, cells.shape, 0)
        # A cell beyond the last position may hold the NaN of an earlier request.
        cells = jnp.where(place <= last, cells, jnp.zeros_like(cells))
    keys, values = cells, cells
    if shape.split:
        keys, values = cells[:, : shape.dim], cells[:, shape.dim :]
    scores = product(q, keys, 1)
    if shape.cap is None:
        scores = scores * (shape.scale * LOG2_E)
    else:
        scores = jnp.tanh(scores * (shape.scale / shape.cap)) * (shape.cap * LOG2_E)
    if masked:
        index = row + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        query = index // shape.share
        key = offset + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        distance = first + query - key
        seen = distance >= 0
        if shape.window is not None:
            seen &= distance < shape.window
        scores = jnp.where(seen, scores, MASKED)
    before = highest[...]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    # The mass of a row that sees no key of the chunk is multiplied by zero later.
    mass = jnp.exp2(scores - repeated(now, scores.shape[1]))
    rescale = jnp.exp2(before - now)
    highest[...] = now
    total[...] = total[...] * rescale + lane_sums(mass)
    added = product(mass.astype(values.dtype), values, 0)
    sums[...] = sums[...] * repeated(rescale, added.shape[1]) + added


def repeated(x: Any, columns: int) -> Any:
    """Widen equal columns without a broadcast across lanes, where they are 128."""
    if columns % LANES:
        return x[:, :1]
    return jnp.concatenate([x] * (columns // LANES), axis=1)


def lane_sums(x: Any) -> Any:
    """Add groups of 128 columns; zeros are appended to the last."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    return sum(x[:, i : i + LANES] for i in range(0, x.shape[1], LANES))


def product(x: Any, y: Any, axis: int) -> Any:
    """Contract the last axis of ``x`` with ``axis`` of ``y``, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
