"""Mixture of experts: which experts a token goes to, what they give, and its sum.

Routing is float32 and exact: experts are ranked by their logits as stored, never by
rounded probabilities. Every op is one call whatever the number of experts and tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.errors import RequestError
from inl.ops.moe_cases import (
    combine_cases,
    dispatch_cases,
    experts_cases,
    gate_cases,
    linear_cases,
    loss_cases,
    route_cases,
    slot_cases,
)
from inl.spec.kernel import PLAIN
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

KINDS = ("softmax_topk", "topk_softmax", "sigmoid")
"""Ways from logits to weights: softmax over all experts and then the k best (Mixtral,
Qwen), softmax over the k best alone, or a sigmoid of each."""

LEAST = 1e-20
"""Smallest sum that weights are divided by."""


class ExpertLinear(NamedTuple):
    """Parameters of :data:`expert_linear`."""

    weight: Array
    """[E, N, K]."""

    @property
    def layout(self) -> str:
        """Unpacked."""
        return PLAIN


class Experts(NamedTuple):
    """Parameters of :data:`experts`: a gated feed-forward layer for each expert."""

    gate: Array
    """[E, I, H]."""
    up: Array
    """[E, I, H]."""
    down: Array
    """[E, H, I]."""

    @property
    def layout(self) -> str:
        """Unpacked."""
        return PLAIN


def _route_shapes(logits: Spec, *, k: int, kind: str, **_: Any) -> tuple[Spec, Spec]:
    check_routing(logits.shape[-1], k, kind)
    shape = logits.shape[0], k
    return Spec(shape, "int32"), Spec(shape, "float32")


def check_routing(experts: int, k: int, kind: str = KINDS[0]) -> None:
    """Raise :class:`RequestError` for a k or a kind that cannot be."""
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
    """Choose ``k`` of the experts for each token of ``logits`` [T, E].

    Returns ids int32 [T, k], best first, ties to the lowest, and weights float32
    [T, k]. ``kind`` is one of :data:`KINDS`; ``renormalize`` lets the weights of a
    token sum to 1. NaN ranks lowest, so that ids are always distinct experts, and all
    weights of its token are NaN: the token is lost in plain sight and no other is.
    Raises :class:`~inl.errors.RequestError` for a k outside 1 to E.
    """
    check_routing(logits.shape[-1], k, kind)
    lost = np.isnan(logits)
    ids = best(np.where(lost, -np.inf, logits), k)
    chosen = np.take_along_axis(logits, ids, -1)
    if kind == "softmax_topk":
        weights = np.take_along_axis(softmax(logits), ids, -1)
    elif kind == "topk_softmax":
        weights = softmax(chosen)
    else:
        weights = 0.5 + 0.5 * np.tanh(0.5 * chosen)
    if renormalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), LEAST)
    weights = np.where(lost.any(-1, keepdims=True), np.nan, weights)
    return ids.astype(np.int32), weights.astype(logits.dtype)


def best(scores: Any, k: int) -> Any:
    """Places of the ``k`` highest of [T, E], ties to the lowest place."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def softmax(x: Any) -> Any:
    """Over the last axis."""
    # Infinities give NaN, as they do on every device, and NumPy need not warn.
    with np.errstate(invalid="ignore"):
        shares = np.exp(x - x.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)


def _linear_flops(_x: Any, ids: Any, w: ExpertLinear) -> int:
    _, rows, columns = w.weight.shape
    return 2 * int(np.prod(ids.shape)) * int(rows) * int(columns)


@op(
    shapes=lambda x, ids, w: Spec((*ids.shape, w.weight.shape[1]), x.dtype),
    cases=lambda rng: _with(ExpertLinear, linear_cases(rng)),
    weights=ExpertLinear,
    flops=_linear_flops,
)
def expert_linear(x: Array, ids: Array, w: ExpertLinear) -> Array:
    """Multiply each slot of a token with the matrix of its own expert.

    x: [T, k, K], or [T, 1, K] for the same in all slots. ids: int32 [T, k], each from
    0 to E - 1. w.weight: [E, N, K]. Returns [T, k, N]. Accumulates in float32 or wider.
    """
    shape = (*ids.shape, w.weight.shape[1])
    out = np.zeros(shape, np.result_type(x, w.weight))
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        rows = x[token, slot if x.shape[1] > 1 else 0]
        out[token, slot] = rows @ w.weight[expert].T
    return out


@op(
    shapes=lambda y, weights: Spec((y.shape[0], y.shape[2]), y.dtype),  # noqa: ARG005
    cases=combine_cases,
)
def combine_experts(y: Array, weights: Array) -> Array:
    """Sum ``y`` [T, k, H] over its slots, times ``weights`` float32 [T, k]: [T, H]."""
    return (y * weights[:, :, None]).sum(1)


def _experts_flops(_x: Any, ids: Any, _weights: Any, w: Experts, **_: Any) -> int:
    _, inner, hidden = w.gate.shape
    return 6 * int(np.prod(ids.shape)) * int(inner) * int(hidden)


@op(
    cases=lambda rng: _with(Experts, experts_cases(rng)),
    weights=Experts,
    flops=_experts_flops,
)
def experts(
    ops: Ops, x: Array, ids: Array, weights: Array, w: Experts, *, activation: str
) -> Array:
    """Send ``x`` [T, H] through the experts ``ids`` [T, k] and sum what they give.

    weights: float32 [T, k]. Each expert is ``down(activation(gate(x)) * up(x))``.
    Returns [T, H], this rank's part. No token is ever dropped.
    """
    slots = x.reshape(x.shape[0], 1, x.shape[1])
    gate = ops.expert_linear(slots, ids, ExpertLinear(w.gate))
    up = ops.expert_linear(slots, ids, ExpertLinear(w.up))
    y = ops.gated_activation(gate, up, activation=activation)
    return ops.combine_experts(ops.expert_linear(y, ids, ExpertLinear(w.down)), weights)


@op(shapes=lambda x, gate: Spec(x.shape, x.dtype), cases=gate_cases)  # noqa: ARG005
def sigmoid_gate(x: Array, gate: Array) -> Array:
    """``x`` [T, H] times the sigmoid of ``gate`` [T, 1], in float32."""
    return x * (0.5 + 0.5 * np.tanh(0.5 * gate))


@op(
    shapes=lambda ids, weights, **_: Spec(ids.shape, weights.dtype),
    cases=slot_cases,
    rounds=False,
)
def drop_overflow(ids: Array, weights: Array, *, experts: int, capacity: int) -> Array:
    """Take from each expert the tokens past its first ``capacity``, in their order.

    ids: int32 [T, k], distinct in a row. weights: float32 [T, k]. Returns float32
    [T, k]: 0 for a dropped slot, the others of its token divided by their sum; all 0
    where every slot of a token is dropped.
    """
    chosen = (ids[:, :, None] == np.arange(experts)).any(1)
    before = np.cumsum(chosen, axis=0) - chosen
    kept = np.where(np.take_along_axis(before, ids, -1) < capacity, weights, 0)
    return kept / np.maximum(kept.sum(-1, keepdims=True), LEAST)


@op(
    cases=lambda rng: _with(Experts, dispatch_cases(rng)),
    weights=Experts,
)
def moe_dispatch(
    ops: Ops, x: Array, logits: Array, w: Experts, *,
    k: int, capacity_factor: float, kind: str, activation: str,
) -> Array:  # fmt: skip
    """Route ``x`` [T, H] by ``logits`` [T, E] through experts of bounded capacity.

    An expert takes ``capacity_of(T, E, k, capacity_factor)`` tokens; what is over is
    dropped in the order of tokens, and a token's weights are divided by the sum of
    those that are left. Returns [T, H]: zeros where all slots of a token were dropped.
    For training and for comparing with such systems: serving never drops.
    """
    ids, weights = ops.route(logits, k=k, kind=kind, renormalize=True)
    count = logits.shape[1]
    capacity = capacity_of(x.shape[0], count, k, capacity_factor)
    weights = ops.drop_overflow(ids, weights, experts=count, capacity=capacity)
    return ops.experts(x, ids, weights, w, activation=activation)


def capacity_of(tokens: int, experts: int, k: int, factor: float) -> int:
    """Tokens that one expert takes: ``floor(tokens * factor * k / experts)``.

    Raises :class:`RequestError` for a factor that is not a finite number above 0.
    """
    if isinstance(factor, bool) or not 0 < factor < float("inf"):
        raise RequestError(
            f"capacity_factor: found {factor!r}, accepted: a finite number above 0"
        )
    return int(tokens * factor * k / experts)


def _loss_shapes(logits: Spec, *, k: int) -> Spec:
    check_routing(logits.shape[-1], k)
    return Spec((), "float32")


@op(shapes=_loss_shapes, cases=loss_cases, rounds=False)
def load_balance_loss(logits: Array, *, k: int) -> Array:
    """How unevenly ``logits`` [T, E] load the experts: 1 is even, E is one for all.

    ``E * sum(f * p)``: f is an expert's share of the T * k choices, p its mean
    probability (Fedus et al., 2021, equation 4, which has k = 1). A float32 scalar; its
    gradient flows through p.
    """
    check_routing(logits.shape[-1], k)
    count = logits.shape[-1]
    choices = np.bincount(best(logits, k).reshape(-1), minlength=count)
    loss = count * (choices / choices.sum() * softmax(logits).mean(0)).sum()
    return np.asarray(loss, logits.dtype)


def _with(weights: Any, cases: Iterable[Case]) -> Iterable[Case]:
    """Put the tuple of a case's weights, its last argument, into their type."""
    for case in cases:
        yield Case(case.name, (*case.args[:-1], weights(*case.args[-1])), case.attrs)
