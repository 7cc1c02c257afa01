"""Linear layers of a few rows, which are limited by reading the weights.

More rows use the device's library, see :func:`inl_torch.eager.linear.product`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from inl.ops.linear import Linear
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.triton.common import PREFERENCE, refuse_dtype
from inl_torch.triton.matmul.products import library_is_faster, multiply
from inl_torch.triton.tuning import Tuning


def linear(x: torch.Tensor, w: Linear, *, tuning: Tuning) -> torch.Tensor:
    return multiply(x, w.weight, w.bias, tuning)


def qkv_linear(
    x: torch.Tensor, w: StackedQkv, *, tuning: Tuning
) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    sizes = (w.weight.shape[0] - 2 * keys, keys, keys)
    return multiply(x, w.weight, w.bias, tuning).split_with_sizes(sizes, 1)


def _refuse(x: Any, w: Any, *, tuning: Tuning) -> str | None:
    reason = library_is_faster(x.shape[0], x.dtype, w.weight.shape, tuning)
    return reason or refuse_dtype(x)


def _refuse_qkv(x: Any, w: Any, *, tuning: Tuning) -> str | None:
    size = sum(part.shape[0] for part in (w.q, w.k, w.v)), w.q.shape[1]
    return library_is_faster(x.shape[0], x.dtype, size, tuning) or refuse_dtype(x)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the linear kernels."""
    yield Kernel(
        "linear",
        "triton",
        partial(linear, tuning=tuning),
        refuse=partial(_refuse, tuning=tuning),
        preference=PREFERENCE,
    )
    yield Kernel(
        "qkv_linear",
        "triton",
        partial(qkv_linear, tuning=tuning),
        refuse=partial(_refuse_qkv, tuning=tuning),
        layout=QKV,
        pack=stack_qkv,
        can_pack=can_stack_qkv,
        preference=PREFERENCE,
    )
