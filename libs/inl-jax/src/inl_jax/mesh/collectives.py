"""Communication between the devices of a mesh, inside a mapped program."""

from __future__ import annotations

from typing import Any, final

import jax

from inl.backend.collectives import Collectives
from inl.placement.placement import Placement
from inl_jax.tensors import Array


@final
class MeshCollectives(Collectives):
    """Verbs over the named axes of a mesh; call them under ``jax.shard_map``.

    One program runs on all devices: they cannot make different calls, as ``send`` and
    ``recv`` are, and have nothing to wait for at a ``barrier``. The three raise
    :class:`~inl.errors.RunnerError`.
    """

    def __init__(self, sizes: Placement) -> None:
        self._sizes = sizes

    def size(self, axis: str) -> int:
        return int(getattr(self._sizes, axis))

    def index(self, axis: str) -> Any:
        return jax.lax.axis_index(axis)

    def all_reduce(self, x: Array, axis: str) -> Array:
        if self.size(axis) == 1:
            return x
        return jax.lax.psum(x, axis)

    def all_gather(self, x: Array, axis: str) -> Array:
        if self.size(axis) == 1:
            return x
        return jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)

    def reduce_scatter(self, x: Array, axis: str) -> Array:
        self._rows(x, axis, "reduce_scatter")
        return jax.lax.psum_scatter(x, axis, tiled=True)

    def all_to_all(self, x: Array, axis: str) -> Array:
        self._rows(x, axis, "all_to_all")
        return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
