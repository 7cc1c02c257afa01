"""Copies of the experts that most tokens choose, on further devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.wrapped import WrappedCheckpoint
from inl.dtypes import HostArray, wrap
from inl.errors import InlError, RequestError
from inl.ops.expert_places import ExpertPlaces
from inl.placement.mesh import EXPERT_OPS
from inl.spec.op import Spec
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint
    from inl.config import EngineConfig
    from inl.spec.model import Model

TABLE = "expert places of layer {}"
"""Name of a layer's table among the tensors of a checkpoint."""


class PlacedLayer(NamedTuple):
    """Weights of a layer of whose experts some have copies."""

    layer: Any
    places: ExpertPlaces | Group


class PlacedOps:
    """Ops of a layer whose router returns places of experts."""

    def __init__(self, ops: Any, places: Any) -> None:
        self._ops, self._places = ops, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route(self, *args: Any, **attrs: Any) -> Any:
        """Compute :data:`inl.ops.moe.route`."""
        return self._placed(*self._ops.route(*args, **attrs))

    def group_route(self, *args: Any, **attrs: Any) -> Any:
        """Compute :data:`inl.ops.group_route.group_route`."""
        return self._placed(*self._ops.group_route(*args, **attrs))

    def _placed(self, ids: Any, weights: Any) -> Any:
        return self._ops.place_experts(ids, self._places), weights


@dataclass(frozen=True)
class ExpertCopies:
    """The expert at each place, for every layer that has experts."""

    orders: tuple[tuple[int, ...], ...]
    """Of each layer: the experts of the first device, then those of the next ones."""
    experts: int

    def applied(self, model: Model, config: Any) -> Model:
        """Return the model with these experts, whose router chooses places."""
        numbers = expert_layers(model, config)
        if len(numbers) != len(self.orders):
            raise RequestError(
                f"expert_copies: found loads of {len(self.orders)} layers; the model "
                f"has {len(numbers)} with experts"
            )
        tree = model.weights(config)
        counts = {
            param.shape[0]
            for index in numbers
            for group in leaves(tree.layers[index])
            if group.op in EXPERT_OPS
            for param in group.params.values()
        }
        if counts != {self.experts}:
            raise RequestError(
                f"expert_copies: found loads of {self.experts} experts; the model has "
                f"{', '.join(map(str, sorted(counts)))} in a layer"
            )
        orders = dict(zip(numbers, self.orders, strict=True))

        def weights(config: Any) -> Any:
            tree = model.weights(config)
            layers = list(tree.layers)
            for index, order in orders.items():
                placed = _in_order(layers[index], order)
                table = Param(TABLE.format(index), self._table_shape)
                layers[index] = PlacedLayer(placed, Group("place_experts", table=table))
            return tree._replace(layers=tuple(layers))

        def layer(ops: Any, config: Any, w: Any, *args: Any, **options: Any) -> Any:
            if isinstance(w, PlacedLayer):
                ops, w = PlacedOps(ops, w.places), w.layer
            return model.layer(ops, config, w, *args, **options)

        # ``prunes_last_layer`` reads the signature.
        return replace(model, weights=weights, layer=wraps(model.layer)(layer))

    @property
    def _table_shape(self) -> tuple[int, int]:
        return self.experts, 2 * self.experts - 1

    def tables(self, model: Model, config: Any) -> dict[str, HostArray]:
        """Return the tables of :data:`~inl.ops.expert_places.place_experts` by name."""
        numbers = expert_layers(model, config)
        return {
            TABLE.format(index): wrap(_table(order, self._table_shape))
            for index, order in zip(numbers, self.orders, strict=True)
        }


@dataclass(frozen=True)
class CopiesOption:
    """What :attr:`~inl.config.EngineConfig.expert_copies` says."""

    count: int
    """Further experts of each layer on each device."""
    path: str
    """JSON file with the tokens of each expert of each layer."""

    def planned(self, devices: int) -> ExpertCopies:
        """Choose the copies by the file; raises RequestError for other contents."""
        loads = read_loads(Path(self.path))
        experts = loads.shape[1]
        most = experts - experts // devices
        if experts % devices or not 0 < self.count <= most:
            raise RequestError(
                f"expert_copies: found {self.count} for {experts} experts on {devices} "
                f"devices; accepted: 1 to {most}, and devices that divide the experts"
            )
        orders = tuple(choose_copies(layer, devices, self.count) for layer in loads)
        return ExpertCopies(orders, experts)


def read_loads(path: Path) -> NDArray[np.float64]:
    """Return the tokens of each expert of each layer [L, E] of a JSON file.

    It has them under "counts", or under "counts" of "expert_loads" as ``inl bench
    --json`` prints. Raises :class:`~inl.errors.RequestError`.
    """
    try:
        found: Any = read_json(path)
        found = found.get("expert_loads", found)
        loads = np.array(found["counts"], np.float64)
    except (
        InlError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise RequestError(
            f"expert_copies: {path}: {type(error).__name__}: {error}; accepted: a JSON "
            'object with "counts", a list of numbers for each layer with experts'
        ) from error
    if (
        loads.ndim != 2
        or not loads.size
        or not (np.isfinite(loads) & (loads >= 0)).all()
    ):
        raise RequestError(
            f"expert_copies: {path}: found counts of shape {list(loads.shape)}; "
            "accepted: numbers of 0 and more, as many for each layer"
        )
    return loads


def choose_copies(
    loads: NDArray[np.float64], devices: int, count: int
) -> tuple[int, ...]:
    """Return the expert at each place, devices one after the other.

    loads: tokens of each expert [E]. Every device keeps its own E / devices experts,
    and gets ``count`` copies: again and again the expert with the most tokens for each
    of its places gets a further one, on the least loaded device that has a free place
    and not the expert. Ties go to the lowest number.
    """
    own = len(loads) // devices
    held = [list(range(start, start + own)) for start in range(0, len(loads), own)]
    places = np.ones(len(loads))
    for _ in range(devices * count):
        shares = loads / places
        totals = [shares[each].sum() for each in held]
        expert, device = next(
            (expert, device)
            for expert in np.argsort(-shares, kind="stable").tolist()
            for device in sorted(range(devices), key=lambda one: totals[one])
            if len(held[device]) < own + count and expert not in held[device]
        )
        held[device].append(expert)
        places[expert] += 1
    return tuple(expert for each in held for expert in each)


def device_imbalance(
    loads: NDArray[np.float64], order: Sequence[int], devices: int
) -> float:
    """Return the tokens of the most loaded device relative to the mean."""
    places = np.bincount(order, minlength=len(loads))
    each = (loads / places)[list(order)].reshape(devices, -1).sum(-1)
    return float(each.max() / each.mean()) if each.any() else 1.0


def expert_layers(model: Model, config: Any) -> list[int]:
    """Return the indices of the layers that have experts."""
    layers = model.weights(config).layers
    return [
        index
        for index, layer in enumerate(layers)
        if any(group.op in EXPERT_OPS for group in leaves(layer))
    ]


def _in_order(layer: Any, order: tuple[int, ...]) -> Any:
    def changed(group: Group) -> Group:
        if group.op not in EXPERT_OPS:
            return group
        return Group(
            group.op,
            **{name: _ordered(each, order) for name, each in group.params.items()},
        )

    return tree_map(changed, layer)


def _ordered(param: Param, order: tuple[int, ...]) -> Param:
    return param._replace(
        shape=(len(order), *param.shape[1:]), order=order,
        aliases=tuple(_ordered(each, order) for each in param.aliases),
    )  # fmt: skip


def _table(order: Sequence[int], shape: tuple[int, int]) -> NDArray[np.int32]:
    """Return the place of each expert by a number that tokens choose."""
    table = np.empty(shape, np.int32)
    for expert in range(shape[0]):
        places = np.flatnonzero(np.equal(order, expert))
        table[expert] = np.resize(places, shape[1])
    return table


class TablesCheckpoint(WrappedCheckpoint):
    """A checkpoint with further tensors that are in memory."""

    def __init__(self, inner: Checkpoint, tables: Mapping[str, HostArray]) -> None:
        super().__init__(inner)
        self._tables = tables

    def names(self) -> list[str]:
        return [*self._inner.names(), *self._tables]

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self._tables:
            return self._tables[name].dtype, self._tables[name].shape
        return self._inner.spec(name)

    def tensor(self, name: str) -> HostArray:
        return self._tables[name] if name in self._tables else self._inner.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> HostArray:
        if name in self._tables:
            return super().rows(name, start, stop)
        return self._inner.rows(name, start, stop)


def table_specs(tables: Mapping[str, HostArray]) -> dict[str, Spec]:
    """Return the specs of tables by name."""
    return {name: Spec(each.shape, each.dtype) for name, each in tables.items()}


def planned_copies(
    config: EngineConfig, devices: int, *, is_mesh: bool
) -> ExpertCopies | None:
    """Return the copies that an engine's config asks for; ``None`` for none.

    devices: number that share the experts. Raises
    :class:`~inl.errors.RequestError` where no devices do, and for a mesh.
    """
    if config.expert_copies is None:
        return None
    if devices == 1 or is_mesh:
        raise RequestError(
            f"expert_copies: found {config.expert_copies!r:.80} with experts on "
            f"{'a mesh' if is_mesh else 'one device'}; accepted: None, or a mixture "
            "whose experts several ranks share (expert or data in the placement)"
        )
    return parse_copies(config.expert_copies).planned(devices)


def parse_copies(text: object) -> CopiesOption:
    """Read "N:FILE"; raises :class:`~inl.errors.RequestError`."""
    count, _, path = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 5 and path):
        raise RequestError(
            f"EngineConfig.expert_copies: found {text!r:.80}, accepted: None or "
            "N:FILE, such as 2:loads.json"
        )
    return CopiesOption(int(count), path)
