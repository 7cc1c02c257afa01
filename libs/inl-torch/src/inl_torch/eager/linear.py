"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from inl.dtypes import HostArray, wrap
from inl.ops.linear import Linear
from inl.spec.kernel import HostGroup, Kernel
from inl.spec.op import Spec
from inl.spec.weights import in_layout
from inl.weights.load import to_dtype
from inl.weights.packing import present

QKV = "qkv_stacked"
"""Layout of :class:`StackedQkv`."""


@in_layout(QKV)
class StackedQkv(NamedTuple):
    """Query, key and value projections stacked to one matrix."""

    weight: Any
    """[queries + keys + values, K]; a kernel may pack it in a layout of its own."""
    keys: torch.Tensor
    """View of the key rows of ``weight`` or its codes; its shape gives their number."""
    bias: torch.Tensor | None = None


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` [T, K] @ ``weight`` [N, K].T + ``bias`` [N]: [T, N]."""
    # On the CPU torch's matrix-vector product in bfloat16 is twice as fast as its GEMM.
    if x.dtype == torch.bfloat16 and x.shape[0] == 1 and x.device.type == "cpu":
        row = x[0]
        y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return y.unsqueeze(0)
    return functional.linear(x, weight, bias)


def linear(x: torch.Tensor, w: Linear) -> torch.Tensor:
    return product(x, w.weight, w.bias)


def qkv_linear(x: torch.Tensor, w: StackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    sizes = (w.weight.shape[0] - 2 * keys, keys, keys)
    return product(x, w.weight, w.bias).split_with_sizes(sizes, 1)


def soft_cap(x: torch.Tensor, *, cap: float) -> torch.Tensor:
    return torch.div(x.float(), cap).tanh_().mul_(cap).to(x.dtype)


def can_stack_qkv(**stored: Spec) -> str | None:
    if stored["k"].shape != stored["v"].shape:
        return "keys and values of different sizes"
    return None


def stack_qkv(group: HostGroup, backend: Any, dtype: str) -> StackedQkv:
    matrices = [present(group[name]) for name in "qkv"]
    weight: torch.Tensor = backend.tensor(stack(matrices, dtype))
    queries, keys, _ = (matrix.shape[0] for matrix in matrices)
    bias: torch.Tensor | None = None
    biases = [group.get(f"{name}_bias") for name in "qkv"]
    if any(part is not None for part in biases):
        parts = [
            part or wrap(np.zeros(matrix.shape[0], np.float32))
            for part, matrix in zip(biases, matrices, strict=True)
        ]
        bias = backend.tensor(stack(parts, dtype))
    return StackedQkv(weight, weight[queries : queries + keys], bias)


def stack(parts: Sequence[HostArray | None], dtype: str) -> HostArray:
    """Concatenate arrays by rows in ``dtype``; read-only, so that it can be aliased."""
    converted = [to_dtype(present(part), dtype) for part in parts]
    data = np.concatenate([part.data.reshape(part.shape) for part in converted])
    data.setflags(write=False)
    return HostArray(data, dtype, data.shape)


KERNELS = (
    Kernel("linear", "eager", linear),
    Kernel("soft_cap", "eager", soft_cap, invariant=True),
    Kernel(
        "qkv_linear",
        "eager",
        qkv_linear,
        layout=QKV,
        pack=stack_qkv,
        can_pack=can_stack_qkv,
    ),
)
