"""Fused ops of a decoding step, of one or two launches each: see :mod:`inl.ops.fused`.

They support a few rows, which are limited by reading the weights; more rows use the
unfused ops, except for logits, whose rows are gathered by the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.common import PREFERENCE, refuse_dtype, refuse_row
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.matmul.mlp import matrices
from inl_torch.triton.matmul.products import (
    MIXED,
    fastest,
    library_is_faster,
    multiply,
    norm_product,
    refuse_library,
    refuse_own,
)
from inl_torch.triton.norm import add_rms_norm
from inl_torch.triton.tuning import Tuning


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedQkv, *,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    summed, y = norm_product(residual, delta, None, norm, w.weight, w.bias, eps, tuning)
    keys = w.keys.shape[0]
    sizes = (y.shape[1] - 2 * keys, keys, keys)
    return summed, *y.split_with_sizes(sizes, 1)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedMlp, *,
    eps: float, activation: str, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    summed, y = norm_product(
        residual, delta, None, norm, w.gate_up, None, eps, tuning, gated=activation
    )
    return summed, multiply(y, w.down, None, tuning)


def norm_mlp_with_library(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedMlp, *,
    eps: float, activation: str, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The layer where the library is faster at the down projection."""
    summed, y = norm_product(
        residual, delta, None, norm, w.gate_up, None, eps, tuning, gated=activation
    )
    return summed, fastest(y, w.down, None, tuning)


def norm_logits(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor, norm: Norm,
    w: Linear, *, eps: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return norm_product(residual, delta, samples, norm, w.weight, w.bias, eps, tuning)[
        1
    ]


def norm_logits_with_library(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor, norm: Norm,
    w: Linear, *, eps: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    """The logits where the library is faster: after the norm of the sampled rows."""
    rows, dtype = samples.shape[0], residual.dtype
    if not library_is_faster(rows, dtype, w.weight.shape, tuning):
        # Exact sizes share the kernel of their class.
        return norm_logits(residual, delta, samples, norm, w, eps=eps, tuning=tuning)
    _, x = add_rms_norm(residual, delta, samples, norm, eps, tuning)
    return library_product(x, w.weight, w.bias)


def refuse_qkv(
    residual: Any,
    _delta: Any,
    _norm: Any,
    w: Any,
    *,
    tuning: Tuning,
    **_: Any,
) -> str | None:
    size = sum(part.shape[0] for part in (w.q, w.k, w.v)), w.q.shape[1]
    tokens, dtype = residual.shape[0], residual.dtype
    return library_is_faster(tokens, dtype, size, tuning) or refuse_dtype(residual)


def refuse_mlp(
    residual: Any, _delta: Any, _norm: Any, w: Any, *, activation: str, tuning: Tuning,
    down: Callable[..., str | None], **_: Any,
) -> str | None:  # fmt: skip
    """down: refuses who computes the down projection."""
    rows, dtype = residual.shape[0], residual.dtype
    first, second = matrices(w)
    reason = refuse_activation(activation) or refuse_dtype(residual)
    reason = reason or library_is_faster(rows, dtype, first, tuning)
    return reason or down(rows, dtype, (second,), tuning)


def refuse_logits(
    residual: Any, _delta: Any, samples: Any, _norm: Any, w: Any, *, tuning: Tuning,
    product: Callable[..., str | None], **_: Any,
) -> str | None:  # fmt: skip
    """product: refuses who computes the product."""
    reason = refuse_row(residual, residual.shape[1])
    size = samples.shape[0], residual.dtype
    return reason or product(*size, (w.weight.shape,), tuning)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels of all fused ops."""

    def kernel(
        op: str, name: str, run: Callable[..., Any], refuse: Callable[..., Any],
        **more: Any,
    ) -> Kernel:  # fmt: skip
        return Kernel(
            op,
            name,
            partial(run, tuning=tuning),
            refuse=partial(refuse, tuning=tuning),
            preference=PREFERENCE,
            **more,
        )

    qkv = {"layout": QKV, "pack": stack_qkv, "can_pack": can_stack_qkv}
    mlp = {"layout": GATE_UP, "pack": stack_mlp}
    yield kernel("norm_qkv", "triton", norm_qkv, refuse_qkv, **qkv)
    own = partial(refuse_mlp, down=refuse_library)
    yield kernel("norm_mlp", "triton", norm_mlp, own, **mlp)
    mixed = partial(refuse_mlp, down=refuse_own)
    yield kernel("norm_mlp", MIXED, norm_mlp_with_library, mixed, **mlp)
    own = partial(refuse_logits, product=refuse_library)
    yield kernel("norm_logits", "triton", norm_logits, own)
    mixed = partial(refuse_logits, product=refuse_own)
    yield kernel("norm_logits", MIXED, norm_logits_with_library, mixed)
