"""Scores and weighted values of one chunk of keys, within the attention kernel.

Tiles of many rows have scores with keys along sublanes and queries along lanes: maxima
are then of whole registers, and products with values fill the matrix unit. Sums are in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from inl_jax.xla.attention import MASKED

LANES = 128
"""Width of a vector register."""

QUERIES = 16
"""Rows of the query matrices are a multiple of this: the sublanes of bfloat16."""

FEW_ROWS = 64
"""Most rows of a key head for which queries run along sublanes, and the loop over heads
is unrolled."""

FEW_TOKENS = 32
"""Tokens that are computed of a tile with a few, such as a decoding row in a step with
prompts."""

AHEAD = 3
"""Blocks of scores that are computed before the softmax of one."""

LOG2_E = 1.4426950408889634


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
    """Rows of a key head's queries that are computed at a time."""
    parts: int
    """Times that they are."""
    tokens: int
    """Tokens of a tile."""
    scale: float
    window: int | None
    cap: float | None
    columns: int
    """Queries of a block of scores, if ``turned``."""

    @property
    def keys(self) -> int:
        """Keys of a chunk."""
        return self.pages * self.page

    @property
    def turned(self) -> bool:
        """Whether keys run along sublanes and queries along lanes."""
        return self.tokens * self.share > FEW_ROWS

    @property
    def split(self) -> bool:
        """Whether keys and values are in different registers."""
        return self.dim % LANES == 0


class Scales(NamedTuple):
    """Scales of an int8 cache."""

    keys: Any
    """[1, keys]"""
    values: Any
    """[1, keys]"""


class Block(NamedTuple):
    """Queries of one head, and the cells of a chunk."""

    q: Any
    """[queries, lanes]"""
    cells: Any
    """[keys, 2 * dim]"""
    scales: Scales | None
    tokens: int
    """Tokens of the queries: those of one query head follow each other if ``turned``,
    else those of one token."""
    sums: Sequence[Any]
    """Maximum, sum and weighted values so far; without the sum if ``turned``."""


class Bounds(NamedTuple):
    """Positions of a tile and a chunk."""

    first: Any
    """First query of the tile."""
    last: Any
    """Last query."""
    offset: Any
    """First key."""


def accumulate(shape: Shape, block: Block, masked: bool, bounds: Bounds) -> None:
    """Add a chunk of one head's cells to its maximum, sum and weighted values.

    The sums of the 128 lanes of the sum are added at the end.
    """
    highest, total, sums = block.sums
    keys, values = parted(shape, block, masked, bounds)
    scores = product(block.q, keys, 1)
    if block.scales is not None:
        scores = scores * block.scales.keys
    scores = scaled(shape, scores)
    if masked:
        row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        scores = hidden(shape, scores, row // shape.share, 1, bounds)
    before = highest[...]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    # The mass of a row that sees no key of the chunk is multiplied by zero later.
    mass = jnp.exp2(scores - repeated(now, scores.shape[1]))
    rescale = jnp.exp2(before - now)
    highest[...] = now
    total[...] = total[...] * rescale + lane_sums(mass)
    if block.scales is not None:
        mass = mass * block.scales.values
    added = product(mass.astype(values.dtype), values, 0)
    sums[...] = sums[...] * repeated(rescale, added.shape[1]) + added


def accumulate_turned(
    shape: Shape, blocks: Sequence[Block], masked: bool, bounds: Bounds, stage: Any
) -> None:
    """:func:`accumulate` with keys along sublanes and queries along lanes.

    Scores of the next blocks are computed beside the softmax of one and kept in
    ``stage``. For this overlap all sums are loaded first and stored last. The last rows
    of the weighted values are the sums of the weights.
    """
    before = [[ref[...] for ref in block.sums] for block in blocks]
    # Products of float32 are several passes, which need the registers themselves.
    ahead = AHEAD if blocks[0].q.dtype == jnp.bfloat16 else 1
    tops: list[Any] = []

    def place(index: int) -> Any:
        return stage.at[index % (AHEAD + 1), :, pl.ds(0, len(blocks[index].q))]

    def start(index: int) -> None:
        q, _, scales, tokens, _ = blocks[index]
        # A score of a cell that is not finite is hidden.
        keys, _ = parted(shape, blocks[index], masked=False, bounds=bounds)
        scores = product(keys, q, 1)
        if scales is not None:
            scores = scores * scales.keys.T
        scores = scaled(shape, scores)
        if masked:
            row = jax.lax.broadcasted_iota(jnp.int32, (1, scores.shape[1]), 1)
            scores = hidden(shape, scores, row % tokens, 0, bounds)
        tops.append(jnp.max(scores, axis=0, keepdims=True))
        place(index)[...] = scores

    for index in range(min(ahead, len(blocks))):
        start(index)
    after = []
    for index, (highest, sums) in enumerate(before):
        if index + ahead < len(blocks):
            start(index + ahead)
        _, values = parted(shape, blocks[index], masked, bounds)
        values = values.T[-shape.dim :]
        scales = blocks[index].scales
        if scales is not None:
            wide = values.astype(jnp.float32) * scales.values
            values = wide.astype(values.dtype)
        ones = jnp.ones((QUERIES, shape.keys), values.dtype)
        now = jnp.maximum(highest, tops[index])
        # As above for a row that sees no key of the chunk.
        mass = jnp.exp2(place(index)[...] - now).astype(values.dtype)
        added = product(jnp.concatenate([values, ones]), mass, 0)
        after.append((now, sums * jnp.exp2(highest - now) + added))
    for block, new in zip(blocks, after, strict=True):
        for ref, value in zip(block.sums, new, strict=True):
            ref[...] = value


def parted(shape: Shape, block: Block, masked: bool, bounds: Bounds) -> tuple[Any, Any]:
    """Return keys and values without their scales, in the dtype of the queries.

    Where they share a register, cells for both.
    """
    cells = block.cells
    if block.scales is not None:
        cells = cells.astype(jnp.float32)
    cells = cells.astype(block.q.dtype)
    if masked and block.scales is None:
        key = bounds.offset + jax.lax.broadcasted_iota(jnp.int32, cells.shape, 0)
        # A cell beyond the last position may hold the NaN of an earlier request.
        cells = jnp.where(key <= bounds.last, cells, jnp.zeros_like(cells))
    if shape.split:
        return cells[:, : shape.dim], cells[:, shape.dim :]
    return cells, cells


def scaled(shape: Shape, scores: Any) -> Any:
    """Scale and cap scores, for powers of two."""
    if shape.cap is None:
        return scores * (shape.scale * LOG2_E)
    return jnp.tanh(scores * (shape.scale / shape.cap)) * (shape.cap * LOG2_E)


def hidden(shape: Shape, scores: Any, tokens: Any, axis: int, bounds: Bounds) -> Any:
    """Mask keys along ``axis`` that the queries of ``tokens`` of a tile do not see."""
    query = bounds.first - bounds.offset + tokens
    key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, axis)
    seen = key <= query
    if shape.window is not None:
        seen &= key > query - shape.window
    return jnp.where(seen, scores, MASKED)


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
