"""Gated feed-forward layers and activations."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inl.ops.activation import check_kind
from inl.ops.xielu import Xielu
from inl.spec.kernel import HostGroup, Kernel
from inl.spec.weights import in_layout
from inl.weights.load import to_dtype
from inl.weights.packing import present
from inl_torch.eager.inl import upcast
from inl_torch.eager.linear import product, stack

GATE_UP = "gate_up_stacked"
"""Layout of :class:`StackedMlp`."""

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR
"""Coefficients of the tanh form of GELU, doubled for its form as a sigmoid."""


ELEMENTWISE = {
    "silu": functional.silu, "relu": torch.relu, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}  # fmt: skip


@in_layout(GATE_UP)
class StackedMlp(NamedTuple):
    """Gate and up projections stacked to one matrix.

    A kernel may pack both matrices in a layout of its own.
    """

    gate_up: Any
    """[2 * I, H]."""
    down: Any
    """[H, I]."""


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, *, activation: str, inplace: bool = False
) -> torch.Tensor:
    """``activation(gate) * up``, computed in float32.

    inplace: whether ``gate`` may be overwritten, which is faster than an allocation.
    """
    if upcast(gate) is not gate:
        return _activate(upcast(gate), upcast(up), activation).to(gate.dtype)
    return _activate(gate if inplace else gate.clone(), up, activation)


def _activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate, inplace=True).mul_(up)
    return _gelu(gate).mul_(up)


def _gelu(gate: torch.Tensor) -> torch.Tensor:
    # As a sigmoid, since 1 + tanh(z) loses all digits for very negative z.
    slope = torch.square(gate).mul_(CUBIC).add_(LINEAR)
    return slope.mul_(gate).sigmoid_().mul_(gate)


def activate(x: torch.Tensor, *, kind: str) -> torch.Tensor:
    check_kind(kind)
    wide = upcast(x)
    if kind == "relu_squared":
        y = wide.relu().square()
    elif kind == "gelu":
        y = 0.5 * wide * torch.erfc(wide * -math.sqrt(0.5))
    elif kind == "gelu_tanh":
        y = _gelu(wide)
    elif kind == "gelu_sigmoid":
        y = wide * (1.702 * wide).sigmoid()
    else:
        y = ELEMENTWISE[kind](wide)
    return y.to(x.dtype)


def xielu(x: torch.Tensor, w: Xielu) -> torch.Tensor:
    wide, (positive, negative, slope) = upcast(x), map(upcast, w)
    bent = torch.where(
        wide > 0,
        positive * wide * wide,
        (torch.expm1(wide.clamp(max=0)) - wide) * negative,
    )
    return (bent + slope * wide).to(x.dtype)


def gated_mlp(x: torch.Tensor, w: StackedMlp, *, activation: str) -> torch.Tensor:
    gate, up = product(x, w.gate_up).chunk(2, 1)
    y = gated_activation(gate, up, activation=activation, inplace=True)
    return product(y, w.down)


def stack_mlp(group: HostGroup, backend: Any, dtype: str) -> StackedMlp:
    gate_up = backend.tensor(stack([group["gate"], group["up"]], dtype))
    return StackedMlp(gate_up, backend.tensor(to_dtype(present(group["down"]), dtype)))


KERNELS = (
    Kernel("activate", "eager", activate),
    Kernel("gated_activation", "eager", gated_activation),
    Kernel("xielu", "eager", xielu),
    Kernel("gated_mlp", "eager", gated_mlp, layout=GATE_UP, pack=stack_mlp),
)
