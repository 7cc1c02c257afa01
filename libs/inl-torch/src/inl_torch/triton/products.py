"""Programs that multiply weights with one row, or with a few, of a decoding step.

Each reads its first weights before it waits for the kernel ahead of it, where kernels
may start early: weights never change, and everything else may still be on its way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.mlp import gated
from inl_torch.triton.programs import follow


@triton.jit
def weights(
    weight: tensor, rows: tensor, at: tensor, N: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load a tile of ``weight`` [N, K], zeros outside."""
    mask = (rows < N)[:, None] & (at < K)[None, :]
    return tl.load(weight + rows[:, None] * K + at[None, :], mask=mask, other=0)


@triton.jit
def norm_product(
    residual: tensor, delta: tensor, samples: tensor, gain: tensor, weight: tensor,
    bias: tensor, total: tensor, y: tensor, residual_stride: tensor,
    delta_stride: tensor, eps: tensor, N: tl.constexpr, K: tl.constexpr,
    TAKES: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add, normalize and multiply one row: the norm's scale comes after the product."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    b = weights(weight, rows, at, N, K)
    if GATED:
        c = weights(weight + N * K, rows, at, N, K)
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
        x = tl.load(residual + place * residual_stride + at, mask=inside, other=0)
        more = tl.load(delta + place * delta_stride + at, mask=inside, other=0)
        a = x.to(tl.float32) + more.to(tl.float32)
        if not TAKES:
            first = inside & (tl.program_id(0) == 0)
            tl.store(total + token * K + at, a, mask=first)
        squares += a * a
        a *= tl.load(gain + at, mask=inside, other=0).to(tl.float32)
        sums += b.to(tl.float32) * a[None, :]
        if GATED:
            ups += c.to(tl.float32) * a[None, :]
        if start + COLUMNS < K:
            b = weights(weight, rows, at + COLUMNS, N, K)
            if GATED:
                c = weights(weight + N * K, rows, at + COLUMNS, N, K)
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    result = tl.sum(sums, 1) * scale
    if GATED:
        result = gated(result, tl.sum(ups, 1) * scale, SILU)
    if BIASED:
        result += tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=rows < N)


@triton.jit
def product(
    x: tensor, weight: tensor, bias: tensor, y: tensor, x_stride: tensor,
    N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = weights(weight, rows, tl.arange(0, COLUMNS), N, K)
    follow(EARLY)
    token = tl.program_id(1).to(tl.int64)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        a = tl.load(x + token * x_stride + at, mask=at < K, other=0).to(tl.float32)
        sums += b.to(tl.float32) * a[None, :]
        if start + COLUMNS < K:
            b = weights(weight, rows, at + COLUMNS, N, K)
    result = tl.sum(sums, 1)
    if BIASED:
        result += tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=rows < N)


@triton.jit
def norm_products(
    residual: tensor, delta: tensor, samples: tensor, gain: tensor, weight: tensor,
    bias: tensor, total: tensor, y: tensor, residual_stride: tensor,
    delta_stride: tensor, eps: tensor, N: tl.constexpr, K: tl.constexpr,
    TAKES: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, TOKENS_P: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add, normalize and multiply a few rows, which take turns with the weights."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    b = weights(weight, rows, at, N, K)
    if GATED:
        c = weights(weight + N * K, rows, at, N, K)
    follow(EARLY)
    token = tl.arange(0, TOKENS_P)
    squares = tl.zeros((TOKENS_P,), tl.float32)
    sums = tl.zeros((TOKENS_P, ROWS), tl.float32)
    if GATED:
        ups = tl.zeros((TOKENS_P, ROWS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at < K
        gains = tl.load(gain + at, mask=inside, other=0).to(tl.float32)[None, :]
        wide = b.to(tl.float32) * gains
        if GATED:
            other = c.to(tl.float32) * gains
        for turn in tl.static_range(0, TOKENS):
            place = tl.cast(turn, tl.int64)
            if TAKES:
                place = tl.load(samples + turn).to(tl.int64)
            x = tl.load(residual + place * residual_stride + at, mask=inside, other=0)
            more = tl.load(delta + place * delta_stride + at, mask=inside, other=0)
            a = x.to(tl.float32) + more.to(tl.float32)
            if not TAKES:
                first = inside & (tl.program_id(0) == 0)
                tl.store(total + turn * K + at, a, mask=first)
            mine = token == turn
            squares += tl.where(mine, tl.sum(a * a, 0), 0.0)
            dot = tl.sum(wide * a[None, :], 1)[None, :]
            sums += tl.where(mine[:, None], dot, 0.0)
            if GATED:
                dot = tl.sum(other * a[None, :], 1)[None, :]
                ups += tl.where(mine[:, None], dot, 0.0)
        if start + COLUMNS < K:
            b = weights(weight, rows, at + COLUMNS, N, K)
            if GATED:
                c = weights(weight + N * K, rows, at + COLUMNS, N, K)
    scale = tl.rsqrt(squares / K + eps)[:, None]
    result = sums * scale
    if GATED:
        result = gated(result, ups * scale, SILU)
    if BIASED:
        more = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += more[None, :]
    both = (token < TOKENS)[:, None] & (rows < N)[None, :]
    tl.store(y + token[:, None] * N + rows[None, :], result, mask=both)


@triton.jit
def products(
    x: tensor, weight: tensor, bias: tensor, y: tensor, x_stride: tensor,
    N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, TOKENS: tl.constexpr,
    TOKENS_P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a few rows, which take turns with the weights."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = weights(weight, rows, tl.arange(0, COLUMNS), N, K)
    follow(EARLY)
    token = tl.arange(0, TOKENS_P)
    sums = tl.zeros((TOKENS_P, ROWS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        wide = b.to(tl.float32)
        for turn in tl.static_range(0, TOKENS):
            a = tl.load(x + turn * x_stride + at, mask=at < K, other=0)
            dot = tl.sum(wide * a.to(tl.float32)[None, :], 1)[None, :]
            sums += tl.where((token == turn)[:, None], dot, 0.0)
        if start + COLUMNS < K:
            b = weights(weight, rows, at + COLUMNS, N, K)
    if BIASED:
        more = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        sums += more[None, :]
    both = (token < TOKENS)[:, None] & (rows < N)[None, :]
    tl.store(y + token[:, None] * N + rows[None, :], sums, mask=both)
