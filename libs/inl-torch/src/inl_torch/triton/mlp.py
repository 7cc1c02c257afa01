"""Gated feed-forward layers: activation in one launch, or within the product."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.linear import MOST_ROWS, gemv, tile

BLOCK = 1024


@triton.jit
def gated(
    gate: tensor, up: tensor, SILU: tl.constexpr,
) -> tensor:  # fmt: skip
    """Activate ``gate``, in float32, and multiply by ``up``."""
    if SILU:
        slope = gate
    else:
        # Twice what the tanh form takes the tanh of: 1 + tanh(z) = 2 sigmoid(2 z).
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(tl.minimum(-slope, 80.0))) * up


@triton.jit
def _activate(
    gate: tensor, up: tensor, y: tensor, gate_stride: tensor, up_stride: tensor,
    width: tensor, SILU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    a = tl.load(gate + row * gate_stride + at, mask=inside, other=0).to(tl.float32)
    b = tl.load(up + row * up_stride + at, mask=inside, other=0).to(tl.float32)
    tl.store(y + row * width + at, gated(a, b, SILU), mask=inside)


@triton.jit
def _gate_up(
    x: tensor, weight: tensor, y: tensor, x_stride: tensor, N: tensor, K: tensor,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    inside = rows < N
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        a = tl.load(x + token * x_stride + at, mask=at < K, other=0).to(tl.float32)
        mask = inside[:, None] & (at < K)[None, :]
        cells = weight + rows[:, None] * K + at[None, :]
        below = weight + (rows + N)[:, None] * K + at[None, :]
        gate += tl.load(cells, mask=mask, other=0).to(tl.float32) * a[None, :]
        up += tl.load(below, mask=mask, other=0).to(tl.float32) * a[None, :]
    result = gated(tl.sum(gate, 1), tl.sum(up, 1), SILU)
    tl.store(y + token * N + rows, result, mask=inside)


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, *, activation: str
) -> torch.Tensor:
    gate, up = dense(gate), dense(up)
    rows, width = gate.shape
    y = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    block = min(power(width), BLOCK)
    _activate[(rows, -(-width // block))](
        gate, up, y, gate.stride(0), up.stride(0), width,
        SILU=activation == "silu", BLOCK=block,
    )  # fmt: skip
    return y


def gated_mlp(x: torch.Tensor, w: StackedMlp, *, activation: str) -> torch.Tensor:
    if x.shape[0] > MOST_ROWS:
        gate, up = product(x, w.gate_up).chunk(2, 1)
        return product(gated_activation(gate, up, activation=activation), w.down)
    x, n, k = dense(x), w.gate_up.shape[0] // 2, w.gate_up.shape[1]
    rows, columns = tile(2 * n, k)
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    _gate_up[(-(-n // rows), x.shape[0])](
        x, w.gate_up, y, x.stride(0), n, k, SILU=activation == "silu",
        ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return gemv(y, w.down)


def refuse_activation(activation: str) -> str | None:
    """Refuse all but the two that :func:`gated` computes."""
    if activation not in ("silu", "gelu_tanh"):
        return f"takes silu or gelu_tanh, found {activation}"
    return None


def _refuse(x: Any, _other: Any, *, activation: str) -> str | None:
    return refuse_activation(activation) or refuse_dtype(x)


KERNELS = (
    Kernel(
        "gated_activation",
        "triton",
        gated_activation,
        refuse=_refuse,
        preference=PREFERENCE,
    ),
    Kernel(
        "gated_mlp",
        "triton",
        gated_mlp,
        refuse=_refuse,
        layout=GATE_UP,
        prepare=stack_mlp,
        preference=PREFERENCE,
    ),
)
