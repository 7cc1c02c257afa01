"""Gated activations as one Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype

BLOCK = 1024


@triton.jit
def activate_gate(
    gate: tensor, up: tensor, SILU: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return ``activation(gate) * up`` in float32."""
    if SILU:
        slope = gate
    else:
        # The tanh form of GELU as a sigmoid: 1 + tanh(z) = 2 sigmoid(2 z).
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
    tl.store(y + row * width + at, activate_gate(a, b, SILU), mask=inside)


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


def refuse_activation(activation: str) -> str | None:
    """Refuse activations that :func:`activate_gate` does not compute."""
    if activation not in ("silu", "gelu_tanh"):
        return f"takes silu or gelu_tanh, found {activation}"
    return None


def _refuse(gate: Any, _up: Any, *, activation: str) -> str | None:
    return refuse_activation(activation) or refuse_dtype(gate)


KERNELS = (
    Kernel(
        "gated_activation",
        "triton",
        gated_activation,
        refuse=_refuse,
        invariant=True,
        preference=PREFERENCE,
    ),
)
