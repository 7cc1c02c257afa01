"""How many tokens of a step each expert of a mixture computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.executor.model_step import advance
from inl.placement.mesh import EXPERT_OPS
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.ops.protocol import Ops
    from inl.spec.message import Header
    from inl.spec.model import Model
    from inl.spec.step import Array


class RoutingOps:
    """Ops of a step that also collect the experts that each token is routed to."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.ids: list[Array] = []
        """[T, k] of each layer with experts; of sampled tokens only, [R, k], in a last
        layer that computes no others."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route(self, *args: Any, **attrs: Any) -> Any:
        """Compute :data:`inl.ops.moe.route`."""
        return self._collected(self._ops.route(*args, **attrs))

    def group_route(self, *args: Any, **attrs: Any) -> Any:
        """Compute :data:`inl.ops.group_route.group_route`."""
        return self._collected(self._ops.group_route(*args, **attrs))

    def _collected(self, routed: Any) -> Any:
        self.ids.append(routed[0])
        return routed


def advance_counted(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, state: Any,
    **options: Any,
) -> tuple[Any, tuple[Array, ...], Any]:  # fmt: skip
    """Compute :func:`~inl.executor.model_step.advance`.

    Returns the tokens, the experts of each layer (:attr:`RoutingOps.ids`) and the
    state.
    """
    routing: Any = RoutingOps(ops)
    tokens, state = advance(routing, model, config, weights, message, state, **options)
    return tokens, tuple(routing.ids), state


def count_experts(model: Model, config: Any) -> int:
    """Return the number of experts of a layer; 0 for a model that has none.

    Copies (:mod:`inl.weights.expert_copies`) are the same expert.
    """
    params = (
        next(iter(group.params.values()))
        for group in leaves(model.weights(config))
        if group.op in EXPERT_OPS
    )
    counts = (len({*each.order}) or each.shape[0] for each in params)
    return max(counts, default=0)


def counted(
    ids: Sequence[NDArray[np.int32]], head: Header, experts: int
) -> NDArray[np.int32] | None:
    """Return the tokens of each expert, [layers, experts], without padding.

    ``None`` for a step in which no token was routed.
    """
    if not ids:
        return None
    used = (
        head.used_tokens if len(each) == head.tokens else head.used_rows for each in ids
    )
    rows = [
        np.bincount(each[:count].reshape(-1), minlength=experts)
        for each, count in zip(ids, used, strict=True)
    ]
    return np.stack(rows).astype(np.int32)
