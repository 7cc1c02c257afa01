"""Gated feed-forward layers of a few rows, whose activation is part of a product."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.common import PREFERENCE, refuse_dtype
from inl_torch.triton.matmul.activation import gated_activation, refuse_activation
from inl_torch.triton.matmul.products import (
    MIXED,
    fastest,
    library_is_faster,
    multiply,
    refuse_library,
    refuse_own,
)
from inl_torch.triton.tuning import Tuning


def gated_mlp(
    x: torch.Tensor, w: StackedMlp, *, activation: str, tuning: Tuning
) -> torch.Tensor:
    y = multiply(x, w.gate_up, None, tuning, gated=activation)
    return multiply(y, w.down, None, tuning)


def gated_mlp_with_library(
    x: torch.Tensor, w: StackedMlp, *, activation: str, tuning: Tuning
) -> torch.Tensor:
    """The layer where the library is faster at one of the products, or at both."""
    if library_is_faster(x.shape[0], x.dtype, w.gate_up.shape, tuning):
        gate, up = library_product(x, w.gate_up).chunk(2, 1)
        y = gated_activation(gate, up, activation=activation)
    else:
        y = multiply(x, w.gate_up, None, tuning, gated=activation)
    return fastest(y, w.down, None, tuning)


def matrices(w: Any) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of both products of a layer [2 * I, H], [H, I]."""
    inner, hidden = w.gate.shape
    return (2 * inner, hidden), w.down.shape


def _refuse(
    x: Any, w: Any, *, activation: str, tuning: Tuning, other: Callable[..., str | None]
) -> str | None:
    reason = refuse_activation(activation) or refuse_dtype(x)
    return reason or other(x.shape[0], x.dtype, matrices(w), tuning)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels of the feed-forward layer."""
    for name, run, other in (
        ("triton", gated_mlp, refuse_library),
        (MIXED, gated_mlp_with_library, refuse_own),
    ):
        yield Kernel(
            "gated_mlp",
            name,
            partial(run, tuning=tuning),
            refuse=partial(_refuse, tuning=tuning, other=other),
            layout=GATE_UP,
            pack=stack_mlp,
            preference=PREFERENCE,
        )
