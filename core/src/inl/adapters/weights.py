"""Weight trees with adapters: linear layers beside the stacked matrices of adapters.

A program with adapters computes each linear layer of the model by itself, so that the
terms of adapters can be added to its result: gated feed-forward layers become three
linear layers. A program without adapters has none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from inl.ops.lora import Lora
from inl.spec.step import Array
from inl.spec.strict_array import StrictArray
from inl.spec.tree import is_named
from inl.spec.weights import Group, Param
from inl.weights.plan import WeightPlan

SUFFIX = ".weight"


class AdapterShape(NamedTuple):
    """Room for adapters; all zeros is none."""

    adapters: int
    """Adapters that can be loaded at the same time."""
    rank: int
    """Their maximum rank."""

    @property
    def columns(self) -> int:
        """C: columns of the stacked matrices."""
        return self.adapters * self.rank


class AdaptedLinear(NamedTuple):
    """A linear layer, and the adapters of it."""

    base: Any
    """As :class:`~inl.ops.linear.Linear`, or packed."""
    lora: Lora | None = None


class AdaptedQkv(NamedTuple):
    """Projections to queries, keys and values, and the adapters of each."""

    base: Any
    """As :class:`~inl.ops.linear.QkvLinear`, or packed."""
    loras: tuple[Lora, ...] | None = None


class AdaptedMlp(NamedTuple):
    """A gated feed-forward layer as three linear layers."""

    gate: AdaptedLinear
    up: AdaptedLinear
    down: AdaptedLinear


class AdaptedWeights(NamedTuple):
    """Weights of a program with adapters."""

    model: Any
    """The model's weights, with the types above in its layers."""
    selection: Array
    """[adapters + 1, C]: row i has ones in the columns of adapter i, row 0 none."""


class Site(NamedTuple):
    """One logical matrix [N, K] of the model that may have adapters."""

    param: Param
    ranks: int

    @property
    def module(self) -> str:
        """Name of the module in the checkpoint."""
        return self.param.source.removesuffix(SUFFIX)

    @property
    def stored_shape(self) -> tuple[int, int]:
        """[N, K] of the module, which may hold more rows than this matrix."""
        rows, columns = self.param.shape
        slices = self.param.row_slices
        return (slices.rows if slices else rows), columns

    def shard_shape(self) -> tuple[int, int]:
        """[N, K] on one rank."""
        shape = list(self.param.shape)
        if self.param.axis is not None:
            shape[self.param.axis] //= self.ranks
        return shape[0], shape[1]


def with_adapters(tree: Any) -> Any:
    """Return a model's tree of groups with the types above in its layers."""
    return tree._replace(layers=tuple(_adapted(layer) for layer in tree.layers))


def _adapted(node: Any) -> Any:
    if isinstance(node, Group):
        return _adapted_group(node)
    if is_named(node):
        return type(node)(*map(_adapted, node))
    return tuple(map(_adapted, node)) if isinstance(node, tuple) else node


def _adapted_group(group: Group) -> Any:
    params = dict(group.params)
    matrices = [param for param in params.values() if len(param.shape) == 2]
    if not all(map(_is_site, matrices)):
        return group
    if group.op == "linear":
        return AdaptedLinear(group)
    if group.op == "qkv_linear":
        return AdaptedQkv(group)
    if group.op == "gated_mlp":
        parts = (Group("linear", weight=params[name]) for name in AdaptedMlp._fields)
        return AdaptedMlp(*map(AdaptedLinear, parts))
    return group


def _is_site(param: Param) -> bool:
    """Whether adapters name this tensor as a linear layer of its own."""
    pieces = param.stack or param.fused_slice or param.aliases or param.optional
    return not pieces and param.source.endswith(SUFFIX)


def modules_of(plans: Any) -> dict[str, tuple[int, int]]:
    """Return [N, K] of each module that may have an adapter, by its name.

    plans: tree of :class:`~inl.weights.plan.WeightPlan`.
    """
    found = [site for node in _nodes(plans) for site in sites_of(node)]
    return {site.module: site.stored_shape for site in found}


def sites_of(node: AdaptedLinear | AdaptedQkv) -> tuple[Site, ...]:
    """Return the matrices of a planned node, in the order of its ``Lora`` tuples."""
    plan: WeightPlan = node.base
    matrices = [p for p in plan.group.params.values() if len(p.shape) == 2]
    return tuple(Site(param, plan.ranks) for param in matrices)


def _nodes(tree: Any) -> Iterator[Any]:
    if isinstance(tree, AdaptedLinear | AdaptedQkv):
        yield tree
    elif isinstance(tree, Mapping):
        for key in tree:
            yield from _nodes(tree[key])
    elif isinstance(tree, tuple):
        for item in tree:
            yield from _nodes(item)


def attach(plans: Any, weights: Any, make: Callable[[Site], Lora]) -> Any:
    """Return ``weights`` with the ``Lora`` of every site of ``plans``.

    Both trees have the same nodes; leaves of ``weights`` may be packed groups.
    """
    if isinstance(plans, AdaptedLinear):
        (site,) = sites_of(plans)
        return AdaptedLinear(weights.base, make(site))
    if isinstance(plans, AdaptedQkv):
        return AdaptedQkv(weights.base, tuple(map(make, sites_of(plans))))
    if isinstance(plans, WeightPlan) or not any(_nodes(plans)):
        return weights
    parts = [attach(*pair, make) for pair in zip(plans, weights, strict=True)]
    return type(weights)(*parts) if is_named(weights) else tuple(parts)


def strict_adapters(plans: Any, specs: Any, shape: AdapterShape, dtype: str) -> Any:
    """Return the specs of a model's weights with those of adapters, if any."""
    if not shape.adapters:
        return specs

    def make(site: Site) -> Lora:
        rows, columns = site.shard_shape()
        return Lora(
            StrictArray((shape.columns, columns), dtype),
            StrictArray((rows, shape.columns), dtype),
        )

    selection = StrictArray((shape.adapters + 1, shape.columns), dtype)
    return AdaptedWeights(attach(plans, specs, make), selection)
