"""Checks that a model can be divided among tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from inl.errors import WeightMismatch
from inl.spec.cache import Paged, Slotted
from inl.spec.tree import leaves


def check_shares(groups: Any, state: tuple[Paged | Slotted, ...], ranks: int) -> None:
    """Check that weights and cache divide evenly among ``ranks``.

    groups: tree of :class:`~inl.weights.plan.WeightPlan`. state: specs of the whole
    model's state; its key-value heads must divide too, since a rank attends to whole
    heads only. Raises :class:`~inl.errors.WeightMismatch` naming the tensor and axis,
    or the layers of the cache.
    """
    for plan in leaves(groups):
        for param in plan.group.params.values():
            plan.shard(param)
    for item in state:
        if isinstance(item, Paged) and item.kv_heads % ranks:
            raise WeightMismatch(
                f"cache of layers {item.layers[0]} to {item.layers[-1]}: found "
                f"{item.kv_heads} key-value heads for {ranks} ranks; accepted: a "
                f"number of ranks that divides {item.kv_heads}"
            )
