"""Division of a model among ranks: checks, and models that more ranks divide."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import WeightMismatch
from inl.placement.mesh import EXPERT_OPS
from inl.spec.cache import Paged, Slotted
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Group, Param, RowSlices

if TYPE_CHECKING:
    from inl.spec.model import Model

QKV = "qkv_linear"
"""Op whose weights have rows for each key-value head."""


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
        if isinstance(item, Slotted) and item.rebuild == "tokens" and ranks > 1:
            raise WeightMismatch(
                f"recurrent state {item.name}: found {ranks} ranks; accepted: 1 rank"
            )


def check_experts(model: Model, config: Any, ranks: int) -> None:
    """Check that a model has experts that ``ranks`` divide.

    Raises :class:`~inl.errors.WeightMismatch`.
    """
    if ranks > 1 and not has_experts(model, config):
        raise WeightMismatch(
            f"placement: found expert={ranks}, but the model has no weights of the ops "
            f"{' and '.join(EXPERT_OPS)} to divide; accepted: expert=1"
        )


def has_experts(model: Model, config: Any) -> bool:
    """Return whether a model has experts that ranks can divide."""
    return any(group.op in EXPERT_OPS for group in leaves(model.weights(config)))


def divisible(model: Model, config: Any, ranks: int) -> Model:
    """Return the model with key-value heads and a vocabulary that the ranks divide.

    Raises as :func:`with_repeated_heads`.
    """
    repeated = with_repeated_heads(model, config, ranks)
    return with_padded_vocabulary(repeated, config, ranks)


def with_padded_vocabulary(model: Model, config: Any, ranks: int) -> Model:
    """Return the model with rows of the head up to a multiple of the ranks.

    Rows behind the vocabulary are copies of its last one, whose logits a step leaves
    out. A model whose vocabulary the ranks divide is returned as it is.
    """
    vocab = config.vocab_size
    padding = -vocab % ranks
    if not padding:
        return model

    def weights(config: Any) -> Any:
        tree = model.weights(config)
        params = {
            name: _padded(param, padding) for name, param in tree.head.params.items()
        }
        return tree._replace(head=Group(tree.head.op, **params))

    return replace(model, weights=weights, vocab_size=vocab)


def _padded(param: Param, padding: int) -> Param:
    """Return a parameter of the head with its last row ``padding`` more times."""
    rows = param.shape[0]
    spans = (0, rows), *((rows - 1, rows),) * padding
    return param._replace(
        shape=(rows + padding, *param.shape[1:]),
        row_slices=RowSlices(spans, rows),
        aliases=tuple(_padded(each, padding) for each in param.aliases),
    )


def with_repeated_heads(model: Model, config: Any, ranks: int) -> Model:
    """Return the model with key-value heads repeated to one for each rank.

    For a number of ranks that is a multiple of the number of key-value heads: ranks
    whose query heads share a key-value head each have a copy of it. Other models are
    returned as they are. Raises :class:`~inl.errors.WeightMismatch` if the ranks do not
    divide the query heads.
    """
    paged = [item for item in model.state(config) if isinstance(item, Paged)]
    counts = {(item.kv_heads, item.head_dim) for item in paged}
    heads, dim = counts.pop() if len(counts) == 1 else (ranks, 1)
    groups = list(leaves(model.weights(config)))
    projections = [group for group in groups if group.op == QKV]
    others = (
        param.axis == 0 and param.shape[0] == heads * dim
        for group in groups
        if group.op != QKV
        for param in group.params.values()
    )
    if heads % ranks == 0 or ranks % heads or not projections or any(others):
        return model
    for group in projections:
        queries = group.params["q"].shape[0] // dim
        if queries % ranks:
            raise WeightMismatch(
                f"tensor {group.params['q'].source}: found {queries} query heads for "
                f"{ranks} ranks; accepted: a number of ranks that divides {queries}"
            )
    copies = ranks // heads

    def repeated(group: Group) -> Group:
        if group.op != QKV:
            return group
        given = {
            name: _repeated(param, dim, copies) if name[0] in "kv" else param
            for name, param in group.params.items()
        }
        return Group(group.op, **given)

    def state(config: Any) -> tuple[Paged | Slotted, ...]:
        return tuple(
            item._replace(kv_heads=ranks) if isinstance(item, Paged) else item
            for item in model.state(config)
        )

    weights = model.weights
    return replace(model, weights=lambda c: tree_map(repeated, weights(c)), state=state)


def _repeated(param: Param, dim: int, copies: int) -> Param:
    """Return a parameter [heads * dim, ...] with each head ``copies`` times in turn."""
    whole = param.row_slices or RowSlices(((0, param.shape[0]),), param.shape[0])
    rows = np.concatenate([np.arange(*span) for span in whole.spans])
    rows = np.repeat(rows.reshape(-1, 1, dim), copies, axis=1).reshape(-1)
    ends = [*np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)]
    spans = tuple(
        (int(rows[start]), int(rows[end - 1]) + 1)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    return param._replace(
        shape=(len(rows), *param.shape[1:]),
        row_slices=RowSlices(spans, whole.rows),
        aliases=tuple(_repeated(each, dim, copies) for each in param.aliases),
    )
