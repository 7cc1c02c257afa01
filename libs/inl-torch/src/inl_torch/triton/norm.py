"""Root-mean-square normalization, alone and with the residual's addition."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_row, warps
from inl_torch.triton.pdl import follow
from inl_torch.triton.tuning import Tuning


@triton.jit
def _norm(
    x: tensor, delta: tensor, samples: tensor, weight: tensor, total: tensor,
    y: tensor, x_stride: tensor, delta_stride: tensor, width: tensor, eps: tensor,
    ADDS: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    follow(EARLY)
    place = row
    if TAKES:
        place = tl.load(samples + row).to(tl.int64)
    values = tl.load(x + place * x_stride + at, mask=inside, other=0).to(tl.float32)
    if ADDS:
        more = tl.load(delta + place * delta_stride + at, mask=inside, other=0)
        values += more.to(tl.float32)
        if not TAKES:
            tl.store(total + row * width + at, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(y + row * width + at, values * scale * gain, mask=inside)


def rms_norm(x: torch.Tensor, w: Norm, *, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = dense(x.view(-1, width) if x.is_contiguous() else x.reshape(-1, width))
    block = power(width)
    _norm[(flat.shape[0],)](
        flat, flat, flat, w.weight, y, y, flat.stride(0), 0, width, eps, ADDS=False,
        TAKES=False, BLOCK=block, EARLY=False, num_warps=warps(block),
    )  # fmt: skip
    return y


def reduce_add_norm(
    residual: torch.Tensor, delta: torch.Tensor, w: Norm, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return added_norm(residual, delta, None, w, eps, Tuning())


def added_norm(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor | None, w: Norm,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sum [T, H] and its norm, or the norm of the rows ``samples`` [S] of it alone,
    as both.
    """
    width = residual.shape[1]
    residual, delta = dense(residual), dense(delta)
    rows = residual.shape[0] if samples is None else samples.shape[0]
    y = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    total = y if samples is not None else torch.empty_like(y)
    block = power(width)
    _norm[(rows,)](
        residual, delta, delta if samples is None else samples, w.weight, total, y,
        residual.stride(0), delta.stride(0), width, eps, ADDS=True,
        TAKES=samples is not None, BLOCK=block, EARLY=tuning.starts_early(rows),
        num_warps=warps(block), **tuning.launch(rows),
    )  # fmt: skip
    return total, y


def _refuse(x: Any, *_: Any, **__: Any) -> str | None:
    return refuse_row(x, x.shape[-1])


KERNELS = (
    Kernel("rms_norm", "triton", rms_norm, refuse=_refuse, preference=PREFERENCE),
    Kernel(
        "reduce_add_norm",
        "triton",
        reduce_add_norm,
        refuse=_refuse,
        preference=PREFERENCE,
    ),
)
