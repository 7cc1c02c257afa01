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


@triton.jit
def _norm(
    x: tensor, delta: tensor, weight: tensor, total: tensor, y: tensor,
    x_stride: tensor, delta_stride: tensor, width: tensor, eps: tensor,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * x_stride + at, mask=inside, other=0).to(tl.float32)
    if ADDS:
        more = tl.load(delta + row * delta_stride + at, mask=inside, other=0)
        values += more.to(tl.float32)
        tl.store(total + row * width + at, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    gain = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(y + row * width + at, values * scale * gain, mask=inside)


def rms_norm(x: torch.Tensor, w: Norm, *, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = dense(x.view(-1, width) if x.is_contiguous() else x.reshape(-1, width))
    block = power(width)
    _norm[(flat.shape[0],)](
        flat, flat, w.weight, y, y, flat.stride(0), 0, width, eps,
        ADDS=False, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return y


def reduce_add_norm(
    residual: torch.Tensor, delta: torch.Tensor, w: Norm, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = residual.shape
    residual, delta = dense(residual), dense(delta)
    total = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    y = torch.empty_like(total)
    block = power(width)
    _norm[(rows,)](
        residual, delta, w.weight, total, y, residual.stride(0), delta.stride(0),
        width, eps, ADDS=True, BLOCK=block, num_warps=warps(block),
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
