"""Rotary embedding and KV cache write of a step with prompts, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.cache import Cache
from inl_torch.triton.attention.float8 import stored, to_cache
from inl_torch.triton.attention.rope import rotate
from inl_torch.triton.common import dense, power, warps


@triton.jit
def _rope_write(
    q: tensor, k: tensor, v: tensor, cos: tensor, sin: tensor, writes: tensor,
    q_out: tensor, k_cache: tensor, v_cache: tensor, q_stride: tensor,
    k_stride: tensor, v_stride: tensor, scales: tensor, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_P: tl.constexpr,
    KV_HEADS_P: tl.constexpr, HALF_P: tl.constexpr, VALUES_P: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(writes + token).to(tl.int64)
    width = 2 * HALF * KV_HEADS
    column = tl.arange(0, VALUES_P)
    value = tl.load(v + token * v_stride + column, mask=column < width)
    value = to_cache(value, scales, 1)
    tl.store(v_cache + slot * width + column, value, mask=column < width)
    table = token * HALF
    rotate(
        q + token * q_stride, q_out + token * (2 * HALF * HEADS), cos + table,
        sin + table, None, HEADS, HALF, HEADS_P, HALF_P,
    )  # fmt: skip
    rotate(
        k + token * k_stride, k_cache + slot * width, cos + table, sin + table,
        scales, KV_HEADS, HALF, KV_HEADS_P, HALF_P,
    )  # fmt: skip


def rope_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, writes: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write rotated keys and values to the cache, and return the rotated queries."""
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], dim // 2
    q, k, v = dense(q), dense(k), dense(v)
    rotated = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    _rope_write[(tokens,)](
        q, k, v, cos, sin, writes, rotated, *stored(cache), q.stride(0), k.stride(0),
        v.stride(0), cache.scales, HEADS=heads, KV_HEADS=kv_heads, HALF=half,
        HEADS_P=power(heads), KV_HEADS_P=power(kv_heads), HALF_P=power(half),
        VALUES_P=power(kv_heads * dim),
        num_warps=warps(power(heads) * power(half)),
    )  # fmt: skip
    return rotated
