"""Paged KV cache writes: keys and values in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl_torch.triton.attention.float8 import stored, to_cache
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_row, warps


@triton.jit
def _write(
    k: tensor, v: tensor, k_cache: tensor, v_cache: tensor, writes: tensor,
    scales: tensor, k_stride: tensor, v_stride: tensor, width: tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(writes + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    key = tl.load(k + token * k_stride + column, mask=inside)
    key = to_cache(key, scales, 0)
    tl.store(k_cache + slot * width + column, key, mask=inside)
    value = tl.load(v + token * v_stride + column, mask=inside)
    value = to_cache(value, scales, 1)
    tl.store(v_cache + slot * width + column, value, mask=inside)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, cache: Cache, writes: torch.Tensor
) -> Cache:
    tokens, kv_heads, dim = k.shape
    k, v, width = dense(k), dense(v), kv_heads * dim
    block = power(width)
    _write[(tokens,)](
        k, v, *stored(cache), writes, cache.scales, k.stride(0), v.stride(0), width,
        BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return cache


def _refuse(k: Any, *_: Any) -> str | None:
    return refuse_row(k, k.shape[1] * k.shape[2])


KERNELS = (
    Kernel(
        "write_kv",
        "triton",
        write_kv,
        refuse=_refuse,
        invariant=True,
        preference=PREFERENCE,
    ),
)
