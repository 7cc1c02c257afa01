"""Rotary position embedding of queries and keys, as one Triton kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.rope import RopeScaling
from inl.spec.kernel import Kernel
from inl_torch.eager.rope import plane_frequencies
from inl_torch.triton.attention.float8 import to_cache
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_row, warps
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning


@triton.jit
def rotate(
    x: tensor, y: tensor, cos: tensor, sin: tensor, scales: tensor,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_P: tl.constexpr,
    HALF_P: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate the heads of one token, contiguous at ``x``, and store them to ``y``.

    scales: of ``y``, where it is the keys of a cache in float8.
    """
    head = tl.arange(0, HEADS_P)[:, None]
    plane = tl.arange(0, HALF_P)[None, :]
    inside = (head < HEADS) & (plane < HALF)
    index = head * (2 * HALF) + plane
    a = tl.load(x + index, mask=inside, other=0).to(tl.float32)
    b = tl.load(x + index + HALF, mask=inside, other=0).to(tl.float32)
    c = tl.load(cos + plane, mask=plane < HALF, other=0)
    s = tl.load(sin + plane, mask=plane < HALF, other=0)
    tl.store(y + index, to_cache(a * c - b * s, scales, 0), mask=inside)
    tl.store(y + index + HALF, to_cache(b * c + a * s, scales, 0), mask=inside)


@triton.jit
def _rope(
    q: tensor, k: tensor, cos: tensor, sin: tensor, q_out: tensor, k_out: tensor,
    q_stride: tensor, k_stride: tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, HEADS_P: tl.constexpr, KV_HEADS_P: tl.constexpr,
    HALF_P: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    table = token * HALF
    rotate(
        q + token * q_stride, q_out + token * (2 * HALF * HEADS), cos + table,
        sin + table, None, HEADS, HALF, HEADS_P, HALF_P,
    )  # fmt: skip
    rotate(
        k + token * k_stride, k_out + token * (2 * HALF * KV_HEADS), cos + table,
        sin + table, None, KV_HEADS, HALF, KV_HEADS_P, HALF_P,
    )  # fmt: skip


@triton.jit
def _rope_table(
    positions: tensor, frequencies: tensor, cos: tensor, sin: tensor,
    HALF: tl.constexpr, HALF_P: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute cos and sin of one token. Float64 turns are reduced to [-0.5, 0.5]."""
    plane = tl.arange(0, HALF_P)
    inside = plane < HALF
    frequency = tl.load(frequencies + plane, mask=inside, other=0) * 0.15915494309189535
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    turns = tl.load(positions + token).to(tl.float64) * frequency
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    tl.store(cos + token * HALF + plane, tl.cos(angle), mask=inside)
    tl.store(sin + token * HALF + plane, tl.sin(angle), mask=inside)


def rope_table(
    positions: torch.Tensor, *, dim: int, theta: float, scaling: RopeScaling,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = (positions.shape[0], dim // 2)
    cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    frequencies, _ = plane_frequencies(dim, theta, scaling, positions.device)
    _rope_table[shape[:1]](
        positions, frequencies, cos, sin,
        HALF=dim // 2, HALF_P=power(dim // 2), PDL=tuning.uses_pdl(shape[0]),
        num_warps=1, **tuning.launch(shape[0]),
    )  # fmt: skip
    return cos, sin


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], dim // 2
    q, k = dense(q), dense(k)
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, kv_heads, dim), dtype=k.dtype, device=k.device)
    tile = power(heads) * power(half)
    _rope[(tokens,)](
        q, k, cos.contiguous(), sin.contiguous(), q_out, k_out,
        q.stride(0), k.stride(0), HEADS=heads, KV_HEADS=kv_heads, HALF=half,
        HEADS_P=power(heads), KV_HEADS_P=power(kv_heads), HALF_P=power(half),
        num_warps=warps(tile),
    )  # fmt: skip
    return q_out, k_out


def _refuse(q: Any, *_: Any) -> str | None:
    return refuse_row(q, power(q.shape[1]) * power(q.shape[2] // 2))


def _refuse_table(_positions: Any, *, scaling: RopeScaling, **_: Any) -> str | None:
    if scaling.gain != 1:
        return f"takes a gain of 1 only, found {scaling.gain:g}"
    return None


KERNELS = (
    Kernel(
        "rope", "triton", rope, refuse=_refuse, invariant=True, preference=PREFERENCE
    ),
)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the kernel of a step's rotation table."""
    run = partial(rope_table, tuning=tuning)
    return (
        Kernel(
            "rope_table",
            "triton",
            run,
            _refuse_table,
            invariant=True,
            preference=PREFERENCE,
        ),
    )
