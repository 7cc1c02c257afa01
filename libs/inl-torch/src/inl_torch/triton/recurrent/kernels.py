"""Triton kernels of recurrent layers: state in registers, one token after the other.

Rows from ``used_counts[1]`` and tokens from ``used_counts[2]`` on are padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def delta_steps(
    q: tensor, k: tensor, v: tensor, a: tensor, b: tensor, rate: tensor, shift: tensor,
    table: tensor, out: tensor, starts: tensor, positions: tensor, slots: tensor,
    used_counts: tensor, q_stride: tensor, k_stride: tensor, v_stride: tensor,
    a_stride: tensor, b_stride: tensor, dim: tensor, width: tensor, keys: tensor,
    heads: tensor, scale: tensor, eps: tensor, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TILED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the tokens of one row for WIDTH columns of one head's matrix.

    Strides are those of tokens, ``keys`` is the number of key heads. The program
    of row 0 leaves zeros in slot 0.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, DIM)
    j = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside, columns = i < dim, j < width
    entry = head * dim * width + i[:, None] * width + j[None, :]
    within = inside[:, None] & columns[None, :]
    if row == 0:
        tl.store(table + entry, tl.zeros((DIM, WIDTH), tl.float32), mask=within)
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
            key_head = head % keys if TILED else head // (heads // keys)
            for at in range(start, end):
                at_key = at * k_stride + key_head * dim + i
                at_query = at * q_stride + key_head * dim + i
                at_value = at * v_stride + head * width + j
                key = tl.load(k + at_key, mask=inside, other=0).to(tl.float32)
                query = tl.load(q + at_query, mask=inside, other=0).to(tl.float32)
                value = tl.load(v + at_value, mask=columns, other=0).to(tl.float32)
                decay = tl.load(a + at * a_stride + head).to(tl.float32) + offset
                strength = tl.load(b + at * b_stride + head).to(tl.float32)
                # softplus, without an overflow.
                decay = tl.maximum(decay, 0) + tl.log(1 + tl.exp(-tl.abs(decay)))
                key = key * tl.rsqrt(tl.sum(key * key) + eps)
                query = query * (tl.rsqrt(tl.sum(query * query) + eps) * scale)
                state = state * tl.exp(-speed * decay)
                change = value - tl.sum(key[:, None] * state, 0)
                change = change / (1 + tl.exp(-strength))
                state += key[:, None] * change[None, :]
                y = tl.sum(query[:, None] * state, 0)
                tl.store(out + (at * heads + head) * width + j, y, mask=columns)
            tl.store(place, state, mask=within)


@triton.jit
def conv_tokens(
    x: tensor, table: tensor, weight: tensor, out: tensor, rows: tensor,
    starts: tensor, positions: tensor, slots: tensor, used_counts: tensor,
    tokens: tensor, channels: tensor, x_stride: tensor, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of tokens and channels, from the inputs and the table before.

    Padding is zeros.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    columns = c < channels
    used = t < tl.load(used_counts + 2)
    row = tl.load(rows + t, mask=used, other=0)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    is_continued = used & (tl.load(positions + start, mask=used, other=0) != 0)
    acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        # The input, counted from the first one that the table has.
        at = t - start + tap
        is_given = used & (at >= TAPS - 1)
        token = (start + at - (TAPS - 1)).to(tl.int64)
        given = tl.load(
            x + token[:, None] * x_stride + c[None, :],
            mask=is_given[:, None] & columns[None, :],
            other=0,
        )
        kept = tl.load(
            table + (slot * (TAPS - 1) + at)[:, None] * channels + c[None, :],
            mask=(is_continued & (at < TAPS - 1))[:, None] & columns[None, :],
            other=0,
        )
        factor = tl.load(weight + c * TAPS + tap, mask=columns, other=0)
        seen = given.to(tl.float32) + kept.to(tl.float32)
        acc += seen * factor.to(tl.float32)[None, :]
    place = t.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out + place, acc, mask=(t < tokens)[:, None] & columns[None, :])


@triton.jit
def conv_state(
    x: tensor, table: tensor, starts: tensor, positions: tensor, slots: tensor,
    used_counts: tensor, channels: tensor, x_stride: tensor, TAPS: tl.constexpr,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the last inputs of one row for a tile of channels.

    SIZE: power of two, at least ``TAPS - 1``. The program of row 0 leaves zeros in
    slot 0.
    """
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = (i < TAPS - 1)[:, None] & (c < channels)[None, :]
    if row == 0:
        zeros = tl.zeros((SIZE, CHANNELS), table.dtype.element_ty)
        tl.store(table + i[:, None] * channels + c[None, :], zeros, mask=within)
    if row < tl.load(used_counts + 1):
        start, end = tl.load(starts + row), tl.load(starts + row + 1)
        slot = tl.load(slots + row).to(tl.int64)
        if end > start:
            is_continued = tl.load(positions + start) != 0
            place = table + slot * ((TAPS - 1) * channels) + c[None, :]
            # The input, counted from the first one that the table has.
            at = end - start + i
            is_given = (at >= TAPS - 1)[:, None]
            token = (start + at - (TAPS - 1)).to(tl.int64)
            given = tl.load(
                x + token[:, None] * x_stride + c[None, :],
                mask=within & is_given,
                other=0,
            )
            kept = tl.load(
                place + at[:, None] * channels,
                mask=within & ~is_given & is_continued,
                other=0,
            )
            # No thread may store before another one has loaded.
            tl.debug_barrier()
            tl.store(
                place + i[:, None] * channels,
                tl.where(is_given, given.to(kept.dtype), kept),
                mask=within,
            )
