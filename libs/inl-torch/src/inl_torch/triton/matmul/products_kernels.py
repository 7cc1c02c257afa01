"""Programs that multiply weights with one row, or with a few, of a decoding step.

Each reads its first weights before it waits for the kernel ahead of it, where kernels
may start early: weights never change, and everything else may still be on its way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.matmul.activation import gated
from inl_torch.triton.pdl import follow

SHARE = tl.constexpr(64)
"""Columns of the sum that one program stores."""


@triton.jit
def weights(
    weight: tensor, rows: tensor, at: tensor, N: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load a tile of ``weight`` [N, K], zeros outside."""
    mask = (rows < N)[:, None] & (at < K)[None, :]
    return tl.load(weight + rows[:, None] * K + at[None, :], mask=mask, other=0)


@triton.jit
def row_product(
    samples: tensor, x: tensor, delta: tensor, gain: tensor, weight: tensor,
    bias: tensor, total: tensor, y: tensor, x_stride: tensor, delta_stride: tensor,
    eps: tensor, N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr,
    TAKES: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row; a norm's scale comes after the product."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    b = weights(weight, rows, at, N, K)
    if GATED:
        c = weights(weight + N * K, rows, at, N, K)
    if NORMED:
        g = tl.load(gain + at, mask=at < K, other=0)
    follow(EARLY)
    token = tl.program_id(1).to(tl.int64)
    place = token
    if TAKES:
        place = tl.load(samples + token).to(tl.int64)
    squares = tl.zeros((COLUMNS,), tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATED:
        ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at < K
        a = tl.load(x + place * x_stride + at, mask=inside, other=0).to(tl.float32)
        if NORMED:
            more = tl.load(delta + place * delta_stride + at, mask=inside, other=0)
            a += more.to(tl.float32)
            if not TAKES:
                first = inside & (tl.program_id(0) == 0)
                tl.store(total + token * K + at, a, mask=first)
            squares += a * a
            a *= g.to(tl.float32)
        sums += b.to(tl.float32) * a[None, :]
        if GATED:
            ups += c.to(tl.float32) * a[None, :]
        if start + COLUMNS < K:
            at += COLUMNS
            b = weights(weight, rows, at, N, K)
            if GATED:
                c = weights(weight + N * K, rows, at, N, K)
            if NORMED:
                g = tl.load(gain + at, mask=at < K, other=0)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    result = tl.sum(sums, 1) * scale
    if GATED:
        result = gated(result, tl.sum(ups, 1) * scale, SILU)
    if BIASED:
        result += tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=rows < N)


@triton.jit
def parted(
    weight: tensor, rows: tensor, at: tensor, N: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load some columns of ``weight`` [N, K] for each warp: [warps, rows, columns]."""
    mask = (rows < N)[None, :, None] & (at < K)[:, None, :]
    cells = weight + rows[None, :, None] * K + at[:, None, :]
    return tl.load(cells, mask=mask, other=0)


@triton.jit
def inputs(
    x: tensor, stride: tensor, tokens: tensor, at: tensor, K: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Some columns of ``x`` [tokens, K] for each warp: [warps, tokens, columns]."""
    token = tl.arange(0, TOKENS)
    mask = (token < tokens)[None, :, None] & (at < K)[:, None, :]
    cells = (token.to(tl.int64) * stride)[None, :, None] + at[:, None, :]
    return tl.load(x + cells, mask=mask, other=0)


@triton.jit
def kept(
    total: tensor, sums: tensor, tokens: tensor, at: tensor, K: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Store this program's columns of the sums."""
    token = tl.arange(0, TOKENS)
    mine = (at < K) & (at // SHARE == tl.program_id(0))
    mask = (token < tokens)[None, :, None] & mine[:, None, :]
    tl.store(total + token[None, :, None] * K + at[:, None, :], sums, mask=mask)


@triton.jit
def rows_product(
    x: tensor, delta: tensor, gain: tensor, weight: tensor, bias: tensor, total: tensor,
    y: tensor, x_stride: tensor, delta_stride: tensor, eps: tensor, tokens: tensor,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a few rows on the matrix units.

    Every warp multiplies columns of its own, and the warps' sums are added at the end.
    Where one step of ``COLUMNS`` and one of ``REST`` for each warp are all, weights are
    read ahead, and rows can be added and normed first. All is asked for before anything
    is used, for loads do not move across barriers.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, PARTS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((PARTS, ROWS, TOKENS), tl.float32)
    ups = sums
    if PARTS * (COLUMNS + REST) >= K:
        b = parted(weight, rows, at, N, K)
        if GATED:
            c = parted(weight + N * K, rows, at, N, K)
        if REST:
            last = tl.arange(0, PARTS)[:, None] * REST + tl.arange(0, REST)[None, :]
            last += PARTS * COLUMNS
            b_last = parted(weight, rows, last, N, K)
            if GATED:
                c_last = parted(weight + N * K, rows, last, N, K)
        if NORMED:
            g = tl.load(gain + at, mask=at < K, other=0)
            if REST:
                g_last = tl.load(gain + last, mask=last < K, other=0)
        follow(EARLY)
        a = inputs(x, x_stride, tokens, at, K, TOKENS)
        if REST:
            a_last = inputs(x, x_stride, tokens, last, K, TOKENS)
        if NORMED:
            kind = x.dtype.element_ty
            more = inputs(delta, delta_stride, tokens, at, K, TOKENS)
            if REST:
                more_last = inputs(delta, delta_stride, tokens, last, K, TOKENS)
            wide = a.to(tl.float32) + more.to(tl.float32)
            squares = tl.sum(tl.sum(wide * wide, 2), 0)
            if REST:
                wide_last = a_last.to(tl.float32) + more_last.to(tl.float32)
                squares += tl.sum(tl.sum(wide_last * wide_last, 2), 0)
            scale = tl.rsqrt(squares / K + eps)[None, :, None]
            a = (wide * scale * g.to(tl.float32)[:, None, :]).to(kind)
            kept(total, wide, tokens, at, K, TOKENS)
            if REST:
                gain_last = g_last.to(tl.float32)[:, None, :]
                a_last = (wide_last * scale * gain_last).to(kind)
                kept(total, wide_last, tokens, last, K, TOKENS)
        a = tl.permute(a, (0, 2, 1))
        sums = tl.dot(b, a, sums, input_precision="ieee")
        if GATED:
            ups = tl.dot(c, a, ups, input_precision="ieee")
        if REST:
            a_last = tl.permute(a_last, (0, 2, 1))
            sums = tl.dot(b_last, a_last, sums, input_precision="ieee")
            if GATED:
                ups = tl.dot(c_last, a_last, ups, input_precision="ieee")
    else:
        follow(EARLY)
        for start in tl.range(0, K, PARTS * COLUMNS, num_stages=STAGES):
            a = inputs(x, x_stride, tokens, start + at, K, TOKENS)
            a = tl.permute(a, (0, 2, 1))
            b = parted(weight, rows, start + at, N, K)
            sums = tl.dot(b, a, sums, input_precision="ieee")
            if GATED:
                c = parted(weight + N * K, rows, start + at, N, K)
                ups = tl.dot(c, a, ups, input_precision="ieee")
    result = tl.sum(sums, 0)
    if GATED:
        result = gated(result, tl.sum(ups, 0), SILU)
    if BIASED:
        added = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += added[:, None]
    token = tl.arange(0, TOKENS)
    both = (token < tokens)[None, :] & (rows < N)[:, None]
    tl.store(y + token[None, :] * N + rows[:, None], result, mask=both)
