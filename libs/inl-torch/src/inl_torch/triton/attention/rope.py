"""Rotary position embedding: queries and keys in one launch."""

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
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_row, warps
from inl_torch.triton.pdl import follow
from inl_torch.triton.tuning import Tuning


@triton.jit
def rotate(
    x: tensor, y: tensor, cos: tensor, sin: tensor, HEADS: tl.constexpr,
    HALF: tl.constexpr, HEADS_P: tl.constexpr, HALF_P: tl.constexpr,
) -> None:  # fmt: skip
    """Turn the heads of one token, which lie one after the other at ``x`` and ``y``."""
    head = tl.arange(0, HEADS_P)[:, None]
    lane = tl.arange(0, HALF_P)[None, :]
    inside = (head < HEADS) & (lane < HALF)
    at = head * (2 * HALF) + lane
    a = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0).to(tl.float32)
    c = tl.load(cos + lane, mask=lane < HALF, other=0)
    s = tl.load(sin + lane, mask=lane < HALF, other=0)
    tl.store(y + at, a * c - b * s, mask=inside)
    tl.store(y + at + HALF, b * c + a * s, mask=inside)


@triton.jit
def _rope(
    q: tensor, k: tensor, cos: tensor, sin: tensor, q_out: tensor, k_out: tensor,
    q_stride: tensor, k_stride: tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, HEADS_P: tl.constexpr, KV_HEADS_P: tl.constexpr,
    HALF_P: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    turns = token * HALF
    rotate(
        q + token * q_stride, q_out + token * (2 * HALF * HEADS), cos + turns,
        sin + turns, HEADS, HALF, HEADS_P, HALF_P,
    )  # fmt: skip
    rotate(
        k + token * k_stride, k_out + token * (2 * HALF * KV_HEADS), cos + turns,
        sin + turns, KV_HEADS, HALF, KV_HEADS_P, HALF_P,
    )  # fmt: skip


@triton.jit
def _table(
    positions: tensor, rates: tensor, cos: tensor, sin: tensor, HALF: tl.constexpr,
    HALF_P: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Turns are counted in float64 and cut to half of one: what is left is exact."""
    lane = tl.arange(0, HALF_P)
    inside = lane < HALF
    rate = tl.load(rates + lane, mask=inside, other=0) * 0.15915494309189535
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    turns = tl.load(positions + token).to(tl.float64) * rate
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    tl.store(cos + token * HALF + lane, tl.cos(angle), mask=inside)
    tl.store(sin + token * HALF + lane, tl.sin(angle), mask=inside)


def rope_table(
    positions: torch.Tensor, *, dim: int, theta: float, scaling: RopeScaling,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = (positions.shape[0], dim // 2)
    cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    rates, _ = plane_frequencies(dim, theta, scaling, positions.device)
    _table[shape[:1]](
        positions, rates, cos, sin,
        HALF=dim // 2, HALF_P=power(dim // 2), EARLY=tuning.starts_early(shape[0]),
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
        return f"turns unit vectors only, found a length of {scaling.gain:g}"
    return None


KERNELS = (Kernel("rope", "triton", rope, refuse=_refuse, preference=PREFERENCE),)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """The kernel of a step's table, cut as ``tuning`` says."""
    run = partial(rope_table, tuning=tuning)
    return (Kernel("rope_table", "triton", run, _refuse_table, preference=PREFERENCE),)
