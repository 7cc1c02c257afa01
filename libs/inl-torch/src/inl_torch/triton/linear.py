"""Matrix products of one row with weights: limited by reading the weights once.

More rows go to the device's own library, see :func:`inl_torch.eager.linear.product`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.linear import Linear
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import QKV, StackedQkv, qkv_stacks, stack_qkv
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype

MOST_ROWS = 1
"""Rows of ``x`` that a matrix-vector product takes."""

PROGRAMS = 528
"""Programs that keep every multiprocessor of a large chip busy."""


@triton.jit
def _gemv(
    x: tensor, weight: tensor, bias: tensor, y: tensor, x_stride: tensor, N: tensor,
    K: tensor, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    inside = rows < N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        a = tl.load(x + token * x_stride + at, mask=at < K, other=0).to(tl.float32)
        mask = inside[:, None] & (at < K)[None, :]
        b = tl.load(weight + rows[:, None] * K + at[None, :], mask=mask, other=0)
        total += b.to(tl.float32) * a[None, :]
    result = tl.sum(total, 1)
    if BIASED:
        result += tl.load(bias + rows, mask=inside, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=inside)


def tile(n: int, k: int) -> tuple[int, int]:
    """Rows and columns of the weights that a program takes at once."""
    return min(max(power(n // PROGRAMS), 1), 16), min(max(power(k), 16), 1024)


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` [T, K] times the transpose of ``weight`` [N, K], row by row: [T, N]."""
    (n, k), x = weight.shape, dense(x)
    rows, columns = tile(n, k)
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    _gemv[(-(-n // rows), x.shape[0])](
        x, weight, weight if bias is None else bias, y, x.stride(0), n, k,
        BIASED=bias is not None, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y


def linear(x: torch.Tensor, w: Linear) -> torch.Tensor:
    return gemv(x, w.weight, w.bias)


def qkv_linear(x: torch.Tensor, w: StackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    sizes = (w.weight.shape[0] - 2 * keys, keys, keys)
    return gemv(x, w.weight, w.bias).split_with_sizes(sizes, 1)


def refuse_rows(x: Any, _w: Any, **_: Any) -> str | None:
    """Refuse more rows than share one reading of the weights."""
    if x.shape[0] > MOST_ROWS:
        return f"takes {MOST_ROWS} row, found {x.shape[0]}: a matrix product is faster"
    return refuse_dtype(x)


KERNELS = (
    Kernel("linear", "triton", linear, refuse=refuse_rows, preference=PREFERENCE),
    Kernel(
        "qkv_linear",
        "triton",
        qkv_linear,
        refuse=refuse_rows,
        layout=QKV,
        prepare=stack_qkv,
        packs=qkv_stacks,
        preference=PREFERENCE,
    ),
)
