"""Gated feed-forward layers of a few rows, whose activation is part of a product."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.common import PREFERENCE, refuse_dtype
from inl_torch.triton.matmul.activation import gated_activation, refuse_activation
from inl_torch.triton.matmul.products import library_is_faster, multiply
from inl_torch.triton.tuning import Tuning


def gated_mlp(
    x: torch.Tensor, w: StackedMlp, *, activation: str, tuning: Tuning
) -> torch.Tensor:
    if library_is_faster(x.shape[0], x.dtype, w.gate_up.shape, tuning):
        gate, up = library_product(x, w.gate_up).chunk(2, 1)
        y = gated_activation(gate, up, activation=activation)
    else:
        y = multiply(x, w.gate_up, None, tuning, gated=activation)
    return multiply(y, w.down, None, tuning)


def _refuse(x: Any, _w: Any, *, activation: str) -> str | None:
    return refuse_activation(activation) or refuse_dtype(x)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernel of the feed-forward layer."""
    yield Kernel(
        "gated_mlp",
        "triton",
        partial(gated_mlp, tuning=tuning),
        refuse=_refuse,
        layout=GATE_UP,
        pack=stack_mlp,
        preference=PREFERENCE,
    )
