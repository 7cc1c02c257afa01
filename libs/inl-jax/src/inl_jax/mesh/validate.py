"""Comparison of arrays' shardings with those that they should have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inl.errors import DeviceError
from inl.placement.mesh import EXPERT, TENSOR
from inl.weights.plan import WeightPlan
from inl_jax.mesh.places import Axes, partial_axes


class TensorSharding(NamedTuple):
    """One array's sharding, and the one that it should have."""

    name: str
    shape: tuple[int, ...]
    found: str
    expected: str
    equal: bool
    """Whether both place the same elements on the same devices."""

    def __str__(self) -> str:
        text = f"{self.name} {list(self.shape)}: found {self.found}"
        return text if self.equal else f"{text}, expected {self.expected}"


def validate_sharding(
    arrays: Any, mesh: Mesh, expected: Any
) -> tuple[TensorSharding, ...]:
    """Compare the sharding of each array with the expected one.

    arrays: a ``jax.Array`` or a tree of them. expected: a ``PartitionSpec`` over the
    axes of ``mesh`` for all arrays, or a tree of them that is a prefix of ``arrays``.
    Returns what each array has, in order of the tree. Raises
    :class:`~inl.errors.DeviceError` that lists the arrays whose elements are on other
    devices than expected.
    """
    found = tuple(_compared(arrays, mesh, expected))
    wrong = [str(each) for each in found if not each.equal]
    if wrong:
        lines = "\n  ".join(wrong)
        raise DeviceError(
            f"sharding: {len(wrong)} of {len(found)} arrays differ\n  {lines}\n"
            "place them with jax.device_put(array, NamedSharding(mesh, expected))"
        )
    return found


def _compared(arrays: Any, mesh: Mesh, expected: Any) -> Iterator[TensorSharding]:
    def is_spec(leaf: Any) -> bool:
        return isinstance(leaf, PartitionSpec)

    specs = jax.tree.broadcast(expected, arrays, is_leaf=is_spec)
    named = jax.tree_util.tree_flatten_with_path(arrays)[0]
    flat = jax.tree.leaves(specs, is_leaf=is_spec)
    for (path, array), spec in zip(named, flat, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
        wanted = NamedSharding(mesh, spec)
        yield TensorSharding(
            name,
            array.shape,
            _text(array.sharding),
            _text(wanted),
            array.sharding.is_equivalent_to(wanted, array.ndim),
        )


def _text(sharding: jax.sharding.Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return f"{type(sharding).__name__} on {len(sharding.device_set)} devices"
    sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
    return f"{sharding.spec} over {sizes}"


def validate_weights(runner: Any) -> tuple[TensorSharding, ...]:
    """Compare the weights of a runner on a mesh with the plan of their division.

    runner: a :class:`~inl.runners.local_runner.LocalRunner`. Returns the sharding of
    each tensor by its name in the checkpoint. Raises as :func:`validate_sharding`.
    """
    loaded, place = runner.loaded, runner.executor.backend.place
    arrays: dict[str, Any] = {}
    specs: dict[str, PartitionSpec] = {}

    def add(plan: WeightPlan, group: Any) -> None:
        for name, param in plan.group.params.items():
            array, axes = getattr(group, name), plan.axes(param)
            places: Axes = axes
            if array is not None:
                key = f"{plan.group.op} {param.source}"
                if param.expert_partial and place.mesh.shape[EXPERT] > 1:
                    places = axes = (EXPERT, *axes[1:])
                if plan.kernel and plan.kernel.pack:
                    places = (TENSOR,)
                elif param.partial:
                    places = partial_axes(axes)
                specs[key] = PartitionSpec(*places)
                arrays[key] = array

    jax.tree.map(add, loaded.groups, loaded.weights)
    return validate_sharding(arrays, place.mesh, specs)
