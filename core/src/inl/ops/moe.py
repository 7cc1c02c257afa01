"""Mixture of experts: routing, expert layers and the weighted sum.

Routing is exact: experts are ranked by their logits as stored, not by rounded
probabilities. Each op is one call for any number of experts and tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.errors import RequestError
from inl.ops.moe_cases import (
    combine_cases,
    experts_cases,
    gate_cases,
    linear_cases,
    route_cases,
    typed,
)
from inl.spec.op import Spec, elements, nbytes, op, stored_nbytes
from inl.spec.step import Array
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

KINDS = ("softmax_topk", "topk_softmax", "sigmoid")
"""Routing functions: softmax over all experts, then the k best (Mixtral, Qwen); softmax
over the k best only; or a sigmoid per expert."""

LEAST = 1e-20
"""Lower bound of the sum that weights are divided by."""


class ExpertLinear(NamedTuple):
    """Parameters of :data:`expert_linear`."""

    weight: Array
    """[E, N, K]."""


class Experts(NamedTuple):
    """Parameters of :data:`experts`: a gated feed-forward layer for each expert."""

    gate: Array
    """[E, I, H]."""
    up: Array
    """[E, I, H]."""
    down: Array
    """[E, H, I]."""


def _route_shapes(logits: Spec, *, k: int, kind: str, **_: Any) -> tuple[Spec, Spec]:
    check_routing(logits.shape[-1], k, kind)
    shape = logits.shape[0], k
    return Spec(shape, "int32"), Spec(shape, "float32")


def check_routing(experts: int, k: int, kind: str = KINDS[0]) -> None:
    """Raise :class:`RequestError` for an invalid k or kind."""
    if type(k) is not int or not 0 < k <= experts:
        raise RequestError(
            f"route: k: found {k!r}, accepted: 1 to {experts}, the number of experts"
        )
    if kind not in KINDS:
        raise RequestError(f"route: kind: found {kind!r}, accepted: {', '.join(KINDS)}")


@op(shapes=_route_shapes, cases=route_cases, rounds=False)
def route(
    logits: Array, *, k: int, kind: str, renormalize: bool
) -> tuple[Array, Array]:
    """Choose the top ``k`` experts of each token from ``logits`` [T, E].

    Returns ids int32 [T, k], best first, ties to the lowest id, and weights float32
    [T, k]. ``kind`` is one of :data:`KINDS`; ``renormalize`` scales the weights of each
    token to sum to 1. NaN ranks lowest, so that the ids are distinct, and makes all
    weights of its token NaN; other tokens are not affected. Raises
    :class:`~inl.errors.RequestError` for a k outside 1 to E.
    """
    check_routing(logits.shape[-1], k, kind)
    invalid = np.isnan(logits)
    ids = best(np.where(invalid, -np.inf, logits), k)
    chosen = np.take_along_axis(logits, ids, -1)
    if kind == "softmax_topk":
        weights = np.take_along_axis(softmax(logits), ids, -1)
    elif kind == "topk_softmax":
        weights = softmax(chosen)
    else:
        weights = 0.5 + 0.5 * np.tanh(0.5 * chosen)
    if renormalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), LEAST)
    weights = np.where(invalid.any(-1, keepdims=True), np.nan, weights)
    return ids.astype(np.int32), weights.astype(logits.dtype)


def best(scores: Any, k: int) -> Any:
    """Return the indices of the ``k`` highest scores [T, E], ties to the lowest."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def softmax(x: Any) -> Any:
    """Softmax over the last axis."""
    # Infinite logits give NaN, as on every device; suppress the NumPy warning.
    with np.errstate(invalid="ignore"):
        shares = np.exp(x - x.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)


def _linear_flops(_x: Any, ids: Any, w: ExpertLinear) -> int:
    return 2 * elements(ids) * int(math.prod(w.weight.shape[1:]))


def used_bytes(w: Any, slots: int) -> int:
    """Bytes of the expert matrices that ``slots`` choices read: distinct, at most E."""
    count = next(leaves(w)).shape[0]
    return int(stored_nbytes(w) * min(count, slots) // count)


def _linear_traffic(out: Any, x: Any, ids: Any, w: Any) -> int:
    return nbytes((x, ids, out)) + used_bytes(w, elements(ids))


@op(
    shapes=lambda x, ids, w: Spec((*ids.shape, w.weight.shape[1]), x.dtype),
    cases=lambda rng, *sizes: typed(ExpertLinear, linear_cases(rng, *sizes)),
    weights=ExpertLinear,
    flops=_linear_flops,
    traffic=_linear_traffic,
)
def expert_linear(x: Array, ids: Array, w: ExpertLinear) -> Array:
    """Linear layer per expert: multiply each slot by its expert's matrix.

    x: [T, k, K], or [T, 1, K] to use one input for all slots. ids: int32 [T, k], each
    0 to E - 1. w.weight: [E, N, K]. Returns [T, k, N]. Accumulates in float32 or wider.
    Where ranks have a part of the experts each, ids outside of that range are those of
    other ranks: zeros (:attr:`~inl.spec.kernel.Kernel.run_part`).
    """
    shape = (*ids.shape, w.weight.shape[1])
    out = np.zeros(shape, np.result_type(x, w.weight))
    for expert in range(w.weight.shape[0]):
        if not (ids == expert).any():
            continue
        token, slot = np.nonzero(ids == expert)
        rows = x[token, slot if x.shape[1] > 1 else 0]
        out[token, slot] = rows @ w.weight[expert].T
    return out


@op(
    shapes=lambda y, weights: Spec((y.shape[0], y.shape[2]), y.dtype),  # noqa: ARG005
    cases=combine_cases,
    flops=lambda y, _weights: 2 * elements(y),
)
def combine_experts(y: Array, weights: Array) -> Array:
    """Weighted sum over the slots of each token.

    y: [T, k, H]. weights: float32 [T, k]. Returns [T, H].
    """
    return (y * weights[:, :, None]).sum(1)


def _experts_flops(_x: Any, ids: Any, _weights: Any, w: Experts, **_: Any) -> int:
    return 6 * elements(ids) * int(math.prod(w.gate.shape[1:]))


def _experts_traffic(out: Any, x: Any, ids: Any, weights: Any, w: Any, **_: Any) -> int:
    return nbytes((x, ids, weights, out)) + used_bytes(w, elements(ids))


@op(
    cases=lambda rng, *sizes: typed(Experts, experts_cases(rng, *sizes)),
    weights=Experts,
    flops=_experts_flops,
    traffic=_experts_traffic,
)
def experts(
    ops: Ops, x: Array, ids: Array, weights: Array, w: Experts, *, activation: str
) -> Array:
    """Apply the chosen experts to each token and sum their outputs by weight.

    x: [T, H]. ids: int32 [T, k]. weights: float32 [T, k]. Each expert is
    ``down(activation(gate(x)) * up(x))``. Returns this rank's partial sum, [T, H]. No
    token is dropped.
    """
    slots = x.reshape(x.shape[0], 1, x.shape[1])
    gate = ops.expert_linear(slots, ids, ExpertLinear(w.gate))
    up = ops.expert_linear(slots, ids, ExpertLinear(w.up))
    y = ops.gated_activation(gate, up, activation=activation)
    return ops.combine_experts(ops.expert_linear(y, ids, ExpertLinear(w.down)), weights)


@op(
    shapes=lambda x, gate: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=gate_cases,
    flops=lambda x, _gate: elements(x),
)
def sigmoid_gate(x: Array, gate: Array) -> Array:
    """Multiply ``x`` [T, H] by the sigmoid of ``gate`` [T, 1], in float32."""
    return x * (0.5 + 0.5 * np.tanh(0.5 * gate))
