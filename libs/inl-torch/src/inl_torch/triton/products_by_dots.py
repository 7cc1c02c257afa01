"""The products of :mod:`inl_torch.triton.products` for more rows: by tensor cores.

A program takes some rows of the weights and all rows of the step at once, so that the
weights are read once and its part of the product is a single matrix product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.mlp import gated
from inl_torch.triton.products import weights
from inl_torch.triton.programs import follow


@triton.jit
def norm_products_by_dots(
    residual: tensor, delta: tensor, samples: tensor, gain: tensor, weight: tensor,
    bias: tensor, total: tensor, y: tensor, residual_stride: tensor,
    delta_stride: tensor, eps: tensor, N: tl.constexpr, K: tl.constexpr,
    TAKES: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, TOKENS_P: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add, normalize and multiply: the norm's scale comes after the product."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.arange(0, TOKENS_P)
    follow(EARLY)
    held = token < TOKENS
    place = token.to(tl.int64)
    if TAKES:
        place = tl.load(samples + token, mask=held, other=0).to(tl.int64)
    squares = tl.zeros((TOKENS_P,), tl.float32)
    sums = tl.zeros((ROWS, TOKENS_P), tl.float32)
    if GATED:
        ups = tl.zeros((ROWS, TOKENS_P), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at < K
        both = held[:, None] & inside[None, :]
        b = weights(weight, rows, at, N, K)
        if GATED:
            c = weights(weight + N * K, rows, at, N, K)
        x = tl.load(
            residual + place[:, None] * residual_stride + at[None, :], both, other=0
        )
        more = tl.load(
            delta + place[:, None] * delta_stride + at[None, :], both, other=0
        )
        a = x.to(tl.float32) + more.to(tl.float32)
        if not TAKES:
            first = both & (tl.program_id(0) == 0)
            tl.store(total + token[:, None] * K + at[None, :], a, mask=first)
        squares += tl.sum(a * a, 1)
        a *= tl.load(gain + at, mask=inside, other=0).to(tl.float32)[None, :]
        turned = tl.trans(a.to(b.dtype))
        sums = tl.dot(b, turned, acc=sums)
        if GATED:
            ups = tl.dot(c, turned, acc=ups)
    scale = tl.rsqrt(squares / K + eps)[None, :]
    result = sums * scale
    if GATED:
        result = gated(result, ups * scale, SILU)
    if BIASED:
        more = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += more[:, None]
    both = (rows < N)[:, None] & held[None, :]
    tl.store(y + token[None, :] * N + rows[:, None], result, mask=both)


@triton.jit
def products_by_dots(
    x: tensor, weight: tensor, bias: tensor, y: tensor, x_stride: tensor,
    N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, TOKENS: tl.constexpr,
    TOKENS_P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply the rows of a step."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.arange(0, TOKENS_P)
    follow(EARLY)
    held = token < TOKENS
    sums = tl.zeros((ROWS, TOKENS_P), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        b = weights(weight, rows, at, N, K)
        both = held[:, None] & (at < K)[None, :]
        a = tl.load(x + token[:, None] * x_stride + at[None, :], both, other=0)
        sums = tl.dot(b, tl.trans(a), acc=sums)
    if BIASED:
        more = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        sums += more[:, None]
    both = (rows < N)[:, None] & held[None, :]
    tl.store(y + token[None, :] * N + rows[:, None], sums, mask=both)
