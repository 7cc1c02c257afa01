"""Communication between the devices of a mesh, inside a mapped program."""

from __future__ import annotations

from typing import final

import jax

from inl.backend.base import Collectives
from inl.placement.mesh import MeshSizes
from inl_jax.tensors import Array


@final
class MeshCollectives(Collectives):
    """Sums and concatenations over named axes; call them under ``jax.shard_map``."""

    def __init__(self, sizes: MeshSizes) -> None:
        self._sizes = sizes

    def size(self, axis: str) -> int:
        return int(getattr(self._sizes, axis))

    def all_reduce(self, x: Array, axis: str) -> Array:
        if self.size(axis) == 1:
            return x
        return jax.lax.psum(x, axis)

    def all_gather(self, x: Array, axis: str) -> Array:
        if self.size(axis) == 1:
            return x
        return jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
