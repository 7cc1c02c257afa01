"""Mixture of experts with limited capacity, and the load-balancing loss.

For training, and for comparison with systems that drop tokens.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import RequestError
from inl.ops.moe import LEAST, Experts, best, check_routing, softmax, used_bytes
from inl.ops.moe_cases import dispatch_cases, loss_cases, slot_cases, typed
from inl.spec.op import Spec, nbytes, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


@op(
    shapes=lambda ids, weights, **_: Spec(ids.shape, weights.dtype),
    cases=slot_cases,
    rounds=False,
    used_by="inl-toolkit",
)
def drop_overflow(ids: Array, weights: Array, *, experts: int, capacity: int) -> Array:
    """Drop tokens beyond the ``capacity`` of each expert, in token order.

    ids: int32 [T, k], distinct within a token. weights: float32 [T, k]. Returns weights
    float32 [T, k]: 0 for dropped slots, the others of the token divided by their sum.
    If every slot of a token is dropped, all are 0.
    """
    chosen = (ids[:, :, None] == np.arange(experts)).any(1)
    before = np.cumsum(chosen, axis=0) - chosen
    fits = np.take_along_axis(before, ids, -1) < capacity
    remaining = np.where(fits, weights, 0)
    return remaining / np.maximum(remaining.sum(-1, keepdims=True), LEAST)


def _dispatch_flops(x: Any, _logits: Any, w: Experts, *, k: int, **_: Any) -> int:
    return 6 * int(x.shape[0]) * k * int(math.prod(w.gate.shape[1:]))


def _dispatch_traffic(
    out: Any, x: Any, logits: Any, w: Any, *, k: int, **_: Any
) -> int:
    return nbytes((x, logits, out)) + used_bytes(w, int(x.shape[0]) * k)


@op(
    cases=lambda rng: typed(Experts, dispatch_cases(rng)),
    weights=Experts,
    flops=_dispatch_flops,
    traffic=_dispatch_traffic,
    used_by="inl-toolkit",
)
def moe_dispatch(
    ops: Ops, x: Array, logits: Array, w: Experts, *,
    k: int, capacity_factor: float, kind: str, activation: str,
) -> Array:  # fmt: skip
    """Route tokens to experts of limited capacity and sum their outputs.

    x: [T, H]. logits: [T, E]. Each expert takes ``capacity_of(T, E, k,
    capacity_factor)`` tokens. Later ones are dropped, and the remaining weights of a
    token are divided by their sum. Returns [T, H]; zeros if all slots of a token were
    dropped. For training and for comparison with systems that drop; models that INL
    serves do not use it.
    """
    ids, weights = ops.route(logits, k=k, kind=kind, renormalize=True)
    count = logits.shape[1]
    capacity = capacity_of(x.shape[0], count, k, capacity_factor)
    weights = ops.drop_overflow(ids, weights, experts=count, capacity=capacity)
    return ops.experts(x, ids, weights, w, activation=activation)


def capacity_of(tokens: int, experts: int, k: int, factor: Any) -> int:
    """Capacity of an expert: ``floor(tokens * factor * k / experts)`` tokens.

    Raises :class:`RequestError` for a factor that is not a finite number above 0.
    """
    is_number = isinstance(factor, Real) and not isinstance(factor, bool)
    if not is_number or not 0 < factor < 1e30:
        raise RequestError(
            f"capacity_factor: found {factor!r:.80}, accepted: a finite number above 0"
        )
    return int(tokens * factor * k / experts)


def _loss_shapes(logits: Spec, *, k: int) -> Spec:
    check_routing(logits.shape[-1], k)
    return Spec((), "float32")


@op(shapes=_loss_shapes, cases=loss_cases, rounds=False, used_by="training")
def load_balance_loss(logits: Array, *, k: int) -> Array:
    """Load-balancing loss of ``logits`` [T, E]: 1 if balanced, E at worst.

    ``E * sum(f * p)``: f is an expert's share of the T * k choices, p its mean
    probability (Fedus et al., 2021, equation 4, for k = 1). Returns a float32 scalar.
    The gradient flows through p only.
    """
    check_routing(logits.shape[-1], k)
    count = logits.shape[-1]
    choices = np.bincount(best(logits, k).reshape(-1), minlength=count)
    loss = count * (choices / choices.sum() * softmax(logits).mean(0)).sum()
    return np.asarray(loss, logits.dtype)
