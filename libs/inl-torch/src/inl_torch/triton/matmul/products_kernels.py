"""Triton kernels of products of one row, or of a few rows, with weights.

With programmatic dependent launch, the first weights are loaded before waiting for the
previous kernel: weights never change, whereas all other inputs may not be written yet.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.pdl import pdl_sync

SUM_COLUMNS = tl.constexpr(64)
"""Columns of the residual sum that one program stores."""


@triton.jit
def load_weights(
    weight: tensor, rows: tensor, at: tensor, N: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load a tile of ``weight`` [N, K], 0 out of bounds."""
    mask = (rows < N)[:, None] & (at < K)[None, :]
    return tl.load(weight + rows[:, None] * K + at[None, :], mask=mask, other=0)


@triton.jit
def row_product(
    samples: tensor, x: tensor, delta: tensor, norm_weight: tensor, weight: tensor,
    bias: tensor, summed: tensor, y: tensor, x_stride: tensor, delta_stride: tensor,
    eps: tensor, N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr,
    GATHERS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row; the scale of its norm is applied after the product."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    w = load_weights(weight, rows, at, N, K)
    if GATED:
        w_up = load_weights(weight + N * K, rows, at, N, K)
    if NORMED:
        g = tl.load(norm_weight + at, mask=at < K, other=0)
    pdl_sync(PDL)
    token = tl.program_id(1).to(tl.int64)
    source = token
    if GATHERS:
        source = tl.load(samples + token).to(tl.int64)
    squares = tl.zeros((COLUMNS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if GATED:
        up_acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at < K
        a = tl.load(x + source * x_stride + at, mask=inside, other=0).to(tl.float32)
        if NORMED:
            update = tl.load(delta + source * delta_stride + at, mask=inside, other=0)
            a += update.to(tl.float32)
            if not GATHERS:
                first = inside & (tl.program_id(0) == 0)
                tl.store(summed + token * K + at, a, mask=first)
            squares += a * a
            a *= g.to(tl.float32)
        acc += w.to(tl.float32) * a[None, :]
        if GATED:
            up_acc += w_up.to(tl.float32) * a[None, :]
        if start + COLUMNS < K:
            at += COLUMNS
            w = load_weights(weight, rows, at, N, K)
            if GATED:
                w_up = load_weights(weight + N * K, rows, at, N, K)
            if NORMED:
                g = tl.load(norm_weight + at, mask=at < K, other=0)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    result = tl.sum(acc, 1) * scale
    if GATED:
        result = activate_gate(result, tl.sum(up_acc, 1) * scale, SILU)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=rows < N)


@triton.jit
def load_weights_by_warp(
    weight: tensor, rows: tensor, at: tensor, N: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load different columns of ``weight`` [N, K] per warp: [warps, rows, columns]."""
    mask = (rows < N)[None, :, None] & (at < K)[:, None, :]
    offsets = weight + rows[None, :, None] * K + at[:, None, :]
    return tl.load(offsets, mask=mask, other=0)


@triton.jit
def load_inputs_by_warp(
    x: tensor, stride: tensor, tokens: tensor, at: tensor, K: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load different columns of ``x`` [tokens, K] per warp: [warps, tokens,
    columns].
    """
    token = tl.arange(0, TOKENS)
    mask = (token < tokens)[None, :, None] & (at < K)[:, None, :]
    offsets = (token.to(tl.int64) * stride)[None, :, None] + at[:, None, :]
    return tl.load(x + offsets, mask=mask, other=0)


@triton.jit
def store_sum(
    summed: tensor, acc: tensor, tokens: tensor, at: tensor, K: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Store this program's columns of the residual sum."""
    token = tl.arange(0, TOKENS)
    owned = (at < K) & (at // SUM_COLUMNS == tl.program_id(0))
    mask = (token < tokens)[None, :, None] & owned[:, None, :]
    tl.store(summed + token[None, :, None] * K + at[:, None, :], acc, mask=mask)


@triton.jit
def rows_product(
    x: tensor, delta: tensor, norm_weight: tensor, weight: tensor, bias: tensor,
    summed: tensor, y: tensor, x_stride: tensor, delta_stride: tensor, eps: tensor,
    tokens: tensor, N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LAST_COLUMNS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a few rows on the matrix units.

    Each warp multiplies different columns, and the accumulators of the warps are offset
    at the end. Where one step of ``COLUMNS`` and one of ``LAST_COLUMNS`` per warp cover
    ``K``, weights are prefetched, and the rows can be added and normalized first. All
    loads are issued before any use, since the compiler does not move loads across
    barriers.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, WARPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    up_acc = acc
    if WARPS * (COLUMNS + LAST_COLUMNS) >= K:
        w = load_weights_by_warp(weight, rows, at, N, K)
        if GATED:
            w_up = load_weights_by_warp(weight + N * K, rows, at, N, K)
        if LAST_COLUMNS:
            last = (
                tl.arange(0, WARPS)[:, None] * LAST_COLUMNS
                + tl.arange(0, LAST_COLUMNS)[None, :]
            )
            last += WARPS * COLUMNS
            w_last = load_weights_by_warp(weight, rows, last, N, K)
            if GATED:
                w_up_last = load_weights_by_warp(weight + N * K, rows, last, N, K)
        if NORMED:
            g = tl.load(norm_weight + at, mask=at < K, other=0)
            if LAST_COLUMNS:
                g_last = tl.load(norm_weight + last, mask=last < K, other=0)
        pdl_sync(PDL)
        a = load_inputs_by_warp(x, x_stride, tokens, at, K, TOKENS)
        if LAST_COLUMNS:
            a_last = load_inputs_by_warp(x, x_stride, tokens, last, K, TOKENS)
        if NORMED:
            kind = x.dtype.element_ty
            update = load_inputs_by_warp(delta, delta_stride, tokens, at, K, TOKENS)
            if LAST_COLUMNS:
                update_last = load_inputs_by_warp(
                    delta, delta_stride, tokens, last, K, TOKENS
                )
            x_f32 = a.to(tl.float32) + update.to(tl.float32)
            squares = tl.sum(tl.sum(x_f32 * x_f32, 2), 0)
            if LAST_COLUMNS:
                x_f32_last = a_last.to(tl.float32) + update_last.to(tl.float32)
                squares += tl.sum(tl.sum(x_f32_last * x_f32_last, 2), 0)
            scale = tl.rsqrt(squares / K + eps)[None, :, None]
            a = (x_f32 * scale * g.to(tl.float32)[:, None, :]).to(kind)
            store_sum(summed, x_f32, tokens, at, K, TOKENS)
            if LAST_COLUMNS:
                gain_last = g_last.to(tl.float32)[:, None, :]
                a_last = (x_f32_last * scale * gain_last).to(kind)
                store_sum(summed, x_f32_last, tokens, last, K, TOKENS)
        a = tl.permute(a, (0, 2, 1))
        acc = tl.dot(w, a, acc, input_precision="ieee")
        if GATED:
            up_acc = tl.dot(w_up, a, up_acc, input_precision="ieee")
        if LAST_COLUMNS:
            a_last = tl.permute(a_last, (0, 2, 1))
            acc = tl.dot(w_last, a_last, acc, input_precision="ieee")
            if GATED:
                up_acc = tl.dot(w_up_last, a_last, up_acc, input_precision="ieee")
    else:
        pdl_sync(PDL)
        for start in tl.range(0, K, WARPS * COLUMNS, num_stages=STAGES):
            a = load_inputs_by_warp(x, x_stride, tokens, start + at, K, TOKENS)
            a = tl.permute(a, (0, 2, 1))
            w = load_weights_by_warp(weight, rows, start + at, N, K)
            acc = tl.dot(w, a, acc, input_precision="ieee")
            if GATED:
                w_up = load_weights_by_warp(weight + N * K, rows, start + at, N, K)
                up_acc = tl.dot(w_up, a, up_acc, input_precision="ieee")
    result = tl.sum(acc, 0)
    if GATED:
        result = activate_gate(result, tl.sum(up_acc, 0), SILU)
    if HAS_BIAS:
        offset = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += offset[:, None]
    token = tl.arange(0, TOKENS)
    both = (token < tokens)[None, :] & (rows < N)[:, None]
    tl.store(y + token[None, :] * N + rows[:, None], result, mask=both)
