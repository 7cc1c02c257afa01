"""Triton kernels of the scan of Mamba-2: by tokens, and by products of chunks.

Rows from ``used_counts[1]`` and tokens from ``used_counts[2]`` on are padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def softplus(x: tensor) -> tensor:
    """Compute ``log(1 + exp(x))`` without an overflow."""
    return tl.maximum(x, 0) + tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit
def advance_by_tokens(
    x: tensor, b: tensor, c: tensor, dt: tensor, out: tensor, state: tensor,
    start: tensor, end: tensor, speed: tensor, offset: tensor, factor: tensor,
    x_stride: tensor, b_stride: tensor, c_stride: tensor, dt_stride: tensor,
    out_stride: tensor, inside: tensor, columns: tensor, DIM: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the state [DIM, WIDTH] after tokens [start, end), and store results."""
    i = tl.arange(0, DIM)
    for at in range(start, end):
        key = tl.load(b + at * b_stride + i, mask=inside, other=0).to(tl.float32)
        query = tl.load(c + at * c_stride + i, mask=inside, other=0).to(tl.float32)
        value = tl.load(x + at * x_stride, mask=columns, other=0).to(tl.float32)
        time = softplus(tl.load(dt + at * dt_stride).to(tl.float32) + offset)
        change = key[:, None] * (time * value)[None, :]
        state = state * tl.exp(-speed * time) + change
        y = tl.sum(query[:, None] * state, 0) + factor * value
        tl.store(out + at * out_stride, y, mask=columns)
    return state


@triton.jit
def advance_by_chunks(
    x: tensor, b: tensor, c: tensor, dt: tensor, out: tensor, state: tensor,
    start: tensor, end: tensor, speed: tensor, offset: tensor, factor: tensor,
    x_stride: tensor, b_stride: tensor, c_stride: tensor, dt_stride: tensor,
    out_stride: tensor, inside: tensor, columns: tensor, DIM: tl.constexpr,
    CHUNK: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
) -> tensor:  # fmt: skip
    """The same by products of CHUNK tokens, with operands of the dtype KIND."""
    i = tl.arange(0, DIM)
    order = tl.arange(0, CHUNK)
    later = order[:, None] > order[None, :]
    for first in range(start, end, CHUNK):
        at = first + order
        live = at < end
        tile = live[:, None] & inside[None, :]
        keys = tl.load(b + at[:, None] * b_stride + i[None, :], mask=tile, other=0)
        queries = tl.load(c + at[:, None] * c_stride + i[None, :], mask=tile, other=0)
        strip = live[:, None] & columns[None, :]
        value = tl.load(x + at[:, None] * x_stride, mask=strip, other=0).to(tl.float32)
        time = tl.load(dt + at * dt_stride, mask=live, other=0)
        time = softplus(time.to(tl.float32) + offset)
        decay = tl.where(live, -speed * time, 0)
        timed = value * time[:, None]
        # Differences of running sums would lose small decays behind a large one: what
        # is between two tokens is summed.
        after = tl.where(later, decay[:, None], 0)
        between = tl.where(
            order[:, None] >= order[None, :],
            tl.exp(tl.cumsum(after, 0)),
            0,
        )
        running = tl.exp(tl.cumsum(decay, 0))
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        score = (score * between).to(KIND)
        y = tl.dot(score, timed.to(KIND), input_precision=PRECISION)
        past = tl.dot(queries.to(KIND), state.to(KIND), input_precision=PRECISION)
        y += running[:, None] * past + factor * value
        tl.store(out + at[:, None] * out_stride, y, mask=strip)
        last = tl.exp(tl.sum(after, 0))[:, None] * timed
        state = state * tl.exp(tl.sum(decay, 0))
        changes = tl.trans(keys).to(KIND)
        state += tl.dot(changes, last.to(KIND), input_precision=PRECISION)
    return state


@triton.jit
def ssm_rows(
    x: tensor, b: tensor, c: tensor, dt: tensor, rate: tensor, shift: tensor,
    skip: tensor, table: tensor, out: tensor, starts: tensor, positions: tensor,
    slots: tensor, used_counts: tensor, x_stride: tensor, b_stride: tensor,
    c_stride: tensor, dt_stride: tensor, tokens: tensor, dim: tensor, width: tensor,
    share: tensor, heads: tensor, DIM: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the tokens of one row for WIDTH columns of one head's matrix.

    Strides are those of tokens, ``share`` is the number of heads of a group. CHUNK:
    tokens of a product; rows of one token, and all with 1, are computed by tokens.
    KIND: dtype that sums are rounded to as operands of products. The program of row 0
    leaves zeros in slot 0, and fills the results of padding.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, DIM)
    j = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside, columns = i < dim, j < width
    entry = head * dim * width + i[:, None] * width + j[None, :]
    within = inside[:, None] & columns[None, :]
    factor = tl.load(skip + head).to(tl.float32)
    x += head * width + j
    out += head * width + j
    out_stride = heads * width
    if row == 0:
        tl.store(table + entry, tl.zeros((DIM, WIDTH), tl.float32), mask=within)
        for at in range(tl.load(used_counts + 2).to(tl.int64), tokens):
            value = tl.load(x + at * x_stride, mask=columns, other=0).to(tl.float32)
            tl.store(out + at * out_stride, value * factor, mask=columns)
    if row < tl.load(used_counts + 1):
        start = tl.load(starts + row).to(tl.int64)
        end = tl.load(starts + row + 1).to(tl.int64)
        slot = tl.load(slots + row).to(tl.int64)
        if end > start:
            place = table + slot * (heads * dim * width) + entry
            is_continued = tl.load(positions + start) != 0
            state = tl.load(place, mask=within & is_continued, other=0).to(tl.float32)
            speed = tl.exp(tl.load(rate + head).to(tl.float32))
            offset = tl.load(shift + head).to(tl.float32)
            group = head // share * dim
            b += group
            c += group
            dt += head
            if CHUNK == 1 or end - start == 1:
                state = advance_by_tokens(
                    x, b, c, dt, out, state, start, end, speed, offset, factor,
                    x_stride, b_stride, c_stride, dt_stride, out_stride, inside,
                    columns, DIM,
                )  # fmt: skip
            else:
                state = advance_by_chunks(
                    x, b, c, dt, out, state, start, end, speed, offset, factor,
                    x_stride, b_stride, c_stride, dt_stride, out_stride, inside,
                    columns, DIM, CHUNK, KIND, PRECISION,
                )  # fmt: skip
            tl.store(place, state, mask=within)
