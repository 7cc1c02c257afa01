"""Triton kernels of products with block-sparse matrices.

A program computes one tile of the result and loads the stored blocks only, from lists
of the blocks of each column. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def columns_product(
    x: tensor, values: tensor, order: tensor, starts: tensor, blocks: tensor,
    others: tensor, y: tensor, rows: tensor, x_stride: tensor, y_stride: tensor,
    k_stride: tensor, n_stride: tensor, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a tile of rows with the blocks of one column of blocks.

    k_stride, n_stride: of a block's elements, along the sum and along the result.
    GROUP: tiles of rows whose programs run together, for all columns.
    """
    parts: tl.constexpr = SIZE // COLUMNS
    steps: tl.constexpr = SIZE // INNER
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.num_programs(0) // row_tiles
    first = program // (GROUP * column_tiles) * GROUP
    grouped = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    row_tile, column_tile = first + within % grouped, within // grouped
    column = tl.load(order + column_tile // parts)
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at, k = column_tile % parts * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    x_tile = x + row[:, None] * x_stride + k[None, :]
    w_tile = values + k[:, None] * k_stride + at[None, :] * n_stride
    start, end = tl.load(starts + column), tl.load(starts + column + 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(start * steps, end * steps):
        entry, step = index // steps, index % steps * INNER
        other = tl.load(others + entry)
        block = tl.load(blocks + entry).to(tl.int64)
        a = tl.load(x_tile + (other * SIZE + step), mask=inside, other=0)
        w = tl.load(w_tile + (block * (SIZE * SIZE) + step * k_stride))
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    place = row[:, None] * y_stride + (column * SIZE + at)[None, :]
    tl.store(y + place, acc, mask=inside)


@triton.jit
def blocks_product(
    left: tensor, right: tensor, places: tensor, y: tensor, rows: tensor,
    left_stride: tensor, right_stride: tensor, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of one block of ``left.T @ right``.

    places: [B, 2], row and column of each block of ``y`` [B, SIZE, SIZE].
    """
    parts: tl.constexpr = SIZE // COLUMNS
    block = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tile // parts * ROWS + tl.arange(0, ROWS)
    j = tile % parts * COLUMNS + tl.arange(0, COLUMNS)
    block_row = tl.load(places + 2 * block) * SIZE
    block_column = tl.load(places + 2 * block + 1) * SIZE
    m = tl.arange(0, INNER).to(tl.int64)
    left_tile = left + m[:, None] * left_stride + (block_row + i)[None, :]
    right_tile = right + m[:, None] * right_stride + (block_column + j)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, INNER):
        inside = (start + m < rows)[:, None]
        a = tl.load(left_tile, mask=inside, other=0)
        b = tl.load(right_tile, mask=inside, other=0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
        left_tile += INNER * left_stride
        right_tile += INNER * right_stride
    place = block * (SIZE * SIZE) + i[:, None] * SIZE + j[None, :]
    tl.store(y + place, acc)
