"""Expert layers that are differentiable any number of times, of registered ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from inl.ops.moe import ExpertLinear, Experts
from inl.spec.kernel import Kernel
from inl_torch.eager import moe
from inl_torch.eager.inl import upcast
from inl_torch.eager.mlp import gated_activation
from inl_torch.registered.autocast import autocast
from inl_torch.registered.grouped import collect_rows, dispatch_rows, grouped_linear
from inl_torch.registered.register import is_transformed


class Routing(NamedTuple):
    """Slots (token-expert pairs) in the order of their experts."""

    order: torch.Tensor
    """int64 [T * k]: slot of each sorted row."""
    inverse: torch.Tensor
    """int64 [T * k]: sorted row of each slot."""
    sizes: torch.Tensor
    """int64 [E]: rows of each expert."""

    @classmethod
    def of(cls, ids: torch.Tensor, count: int) -> Routing:
        """Sort the slots of ``ids`` [T, k]; shapes do not depend on values."""
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        slot = torch.arange(flat.shape[0], device=ids.device)
        inverse = torch.zeros_like(order).scatter(0, order, slot)
        none = torch.zeros(count, dtype=flat.dtype, device=ids.device)
        return cls(order, inverse, none.scatter_add(0, flat, torch.ones_like(flat)))


def expert_linear(x: torch.Tensor, ids: torch.Tensor, w: ExpertLinear) -> torch.Tensor:
    """The op ``expert_linear``; under autocast, of its dtype."""
    x, weight = autocast(x, w.weight)
    if not _needs_derivatives(x, weight):
        return moe.expert_linear(x, ids, ExpertLinear(weight))
    order, inverse, sizes = Routing.of(ids, weight.shape[0])
    k = ids.shape[1] // x.shape[1]
    rows = dispatch_rows(x.flatten(0, 1), order, inverse, k)
    y = grouped_linear(rows, sizes, weight, False)
    slots: torch.Tensor = dispatch_rows(y, inverse, order, 1)
    return slots.view(*ids.shape, slots.shape[1])


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Experts,
    *,
    activation: str,
) -> torch.Tensor:
    """The op ``experts``; under autocast, of its dtype."""
    x, *matrices = autocast(x, *w)
    if not _needs_derivatives(x, weights, *matrices):
        return moe.experts(x, ids, weights, Experts(*matrices), activation=activation)
    gate, up, down = matrices
    k = ids.shape[1]
    order, inverse, sizes = Routing.of(ids, gate.shape[0])
    rows = dispatch_rows(x, order, inverse, k)
    inner = gated_activation(
        grouped_linear(rows, sizes, gate, False),
        grouped_linear(rows, sizes, up, False),
        activation=activation,
    )
    y = upcast(grouped_linear(inner, sizes, down, False))
    shares = dispatch_rows(weights.reshape(-1, 1), order, inverse, 1)
    total: torch.Tensor = collect_rows(y * shares, order, inverse, k)
    return total.to(x.dtype)


def _needs_derivatives(*tensors: torch.Tensor) -> bool:
    if is_transformed(*tensors):
        return True
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


_OWN: dict[str, Callable[..., Any]] = {
    "expert_linear": expert_linear,
    "experts": experts,
}

KERNELS = (
    *(kernel for kernel in moe.KERNELS if kernel.op not in _OWN),
    *(Kernel(op, "registered", run) for op, run in _OWN.items()),
)
"""Kernels of mixture of experts on torch tensors, all differentiable."""
