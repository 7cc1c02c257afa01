"""RMS norm, with and without a residual addition, as Triton kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_row, warps
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning


@triton.jit
def _norm(
    x: tensor, delta: tensor, samples: tensor, weight: tensor, summed: tensor,
    y: tensor, sums: tensor, x_stride: tensor, delta_stride: tensor, width: tensor,
    eps: tensor, HAS_DELTA: tl.constexpr, GATHERS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """GROUP: columns whose sum is stored in ``sums`` [rows, width / GROUP]; 0: none."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    norm_weight = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    pdl_sync(PDL)
    source = row
    if GATHERS:
        source = tl.load(samples + row).to(tl.int64)
    values = tl.load(x + source * x_stride + column, mask=inside, other=0).to(
        tl.float32
    )
    if HAS_DELTA:
        update = tl.load(delta + source * delta_stride + column, mask=inside, other=0)
        values += update.to(tl.float32)
        if not GATHERS:
            tl.store(summed + row * width + column, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = (values * scale * norm_weight).to(y.dtype.element_ty)
    tl.store(y + row * width + column, normed, mask=inside)
    if GROUP:
        group = tl.arange(0, BLOCK // GROUP)
        total = tl.sum(tl.reshape(normed.to(tl.float32), (BLOCK // GROUP, GROUP)), 1)
        groups = width // GROUP
        tl.store(sums + row * groups + group, total, mask=group < groups)


def rms_norm(x: torch.Tensor, w: Norm, *, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = dense(x.view(-1, width) if x.is_contiguous() else x.reshape(-1, width))
    block = power(width)
    _norm[(flat.shape[0],)](
        flat, flat, flat, w.weight, y, y, y, flat.stride(0), 0, width, eps,
        HAS_DELTA=False, GATHERS=False, GROUP=0, BLOCK=block, PDL=False,
        num_warps=warps(block),
    )  # fmt: skip
    return y


def reduce_add_norm(
    residual: torch.Tensor, delta: torch.Tensor, w: Norm, *, eps: float, tuning: Tuning
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(residual, delta, None, w, eps, tuning)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor | None, w: Norm,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``residual + delta`` [T, H] and its RMS norm.

    samples: [S] rows to which the norm is restricted; both results are then the norm.
    """
    return _add_norm(residual, delta, samples, w, eps, tuning, 0)[:2]


def norm_and_sums(
    residual: torch.Tensor, delta: torch.Tensor, w: Norm, eps: float, group: int,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``residual + delta`` [T, H], its RMS norm, and the sums of each ``group``
    columns of the norm, float32 [T, H / group].
    """
    return _add_norm(residual, delta, None, w, eps, tuning, group)


def _add_norm(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor | None, w: Norm,
    eps: float, tuning: Tuning, group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    width = residual.shape[1]
    residual, delta = dense(residual), dense(delta)
    rows = residual.shape[0] if samples is None else samples.shape[0]
    y = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    summed, sums = y if samples is not None else torch.empty_like(y), y
    if group:
        size = rows, width // group
        sums = torch.empty(size, dtype=torch.float32, device=residual.device)
    block = power(width)
    _norm[(rows,)](
        residual, delta, delta if samples is None else samples, w.weight, summed, y,
        sums, residual.stride(0), delta.stride(0), width, eps, HAS_DELTA=True,
        GATHERS=samples is not None, GROUP=group, BLOCK=block,
        PDL=tuning.uses_pdl(rows), num_warps=warps(block), **tuning.launch(rows),
    )  # fmt: skip
    return summed, y, sums


def _refuse(x: Any, *_: Any, **__: Any) -> str | None:
    return refuse_row(x, x.shape[-1])


KERNELS = (
    Kernel(
        "rms_norm",
        "triton",
        rms_norm,
        refuse=_refuse,
        invariant=True,
        preference=PREFERENCE,
    ),
)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the norm of a sum, which a decoding step computes twice per layer."""
    return (
        Kernel(
            "reduce_add_norm",
            "triton",
            partial(reduce_add_norm, tuning=tuning),
            refuse=_refuse,
            invariant=True,
            preference=PREFERENCE,
        ),
    )
