"""Backend of several JAX devices, which one program drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec

from inl.backend.base import (
    DeviceMemory,
    Program,
    StateSpec,
    WeightUpdates,
)
from inl.backend.block_io import BlockIO
from inl.backend.collectives import AXES
from inl.backend.state_bytes import state_bytes
from inl.dtypes import SIZES, HostArray
from inl.placement.mesh import DATA, TENSOR, Mesh, first_of
from inl.placement.placement import Placement
from inl.placement.ranks import over_ranks
from inl.spec.cache import Paged, State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl_jax.backend import JaxBackend, device_memory
from inl_jax.mesh import caches
from inl_jax.mesh.collectives import MeshCollectives
from inl_jax.mesh.experts import with_part
from inl_jax.mesh.places import partial_axes
from inl_jax.pages import LAYOUT, paged_state
from inl_jax.programs import Compiler
from inl_jax.tensors import from_host, jax_dtype

C = TypeVar("C")

CACHE_SPEC = PartitionSpec(DATA, TENSOR)
"""Division of the caches: blocks, then key-value heads."""


@final
class MeshBackend(JaxBackend):
    """Devices of a mesh. Programs run on all of them under ``jax.shard_map``.

    single: backend of the first device. devices: as many as ``sizes`` says.
    """

    def __init__(
        self, single: JaxBackend, devices: Sequence[jax.Device], sizes: Placement
    ) -> None:
        self.device, self.traits, self._single = single.device, single.traits, single
        self.sizes = sizes
        grid = np.array(devices).reshape(sizes.sizes)
        self.mesh = jax.sharding.Mesh(grid, AXES)
        self.place = NamedSharding(self.mesh, PartitionSpec())
        self.compiler = Compiler(self.out_of_memory, partial(spread, self.mesh))

    def divided(
        self, data: HostArray, axes: tuple[str | None, ...], partial_sum: bool
    ) -> Any:
        """Copy a whole array to the devices, see :class:`~inl.placement.mesh.Mesh`."""
        if partial_sum and self.sizes.tensor > 1:
            data, places = first_of(data, self.sizes.tensor), partial_axes(axes)
        else:
            places = axes
        sharding = NamedSharding(self.mesh, PartitionSpec(*places))
        size = data.size * SIZES[data.dtype]
        with self._allocating(size, "tensor"):
            return from_host(data, sharding)

    def packed(self, pack: Callable[[int, JaxBackend], Any]) -> Any:
        """Pack the weights of each rank, see :class:`~inl.placement.mesh.Mesh`.

        Arrays of ranks follow each other along axis 0, which the tensor axis divides.
        Only ranks that have a device of this process are packed.
        """
        own = jax.process_index()
        places = {
            rank: [
                x for x in self.mesh.devices[:, :, rank].flat if x.process_index == own
            ]
            for rank in range(self.sizes.tensor)
        }
        places = {rank: devices for rank, devices in places.items() if devices}

        def packed_by(rank: int) -> Any:
            one = copy(self._single)
            one.place = places[rank][0]
            return pack(rank, one)

        def joined(*parts: jax.Array) -> jax.Array:
            first, sharding = parts[0], NamedSharding(self.mesh, PartitionSpec(TENSOR))
            shape = (self.sizes.tensor * len(first), *first.shape[1:])
            copies = [
                jax.device_put(part, device)
                for part, devices in zip(parts, places.values(), strict=True)
                for device in devices
            ]
            return jax.make_array_from_single_device_arrays(shape, sharding, copies)

        trees = [packed_by(rank) for rank in places]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(trees[0]))
        with self._allocating(size, "tensor"):
            return jax.tree.map(joined, *trees)

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        whole = tuple(
            item._replace(kv_heads=item.kv_heads * self.sizes.tensor)
            if isinstance(item, Paged)
            else item
            for item in spec
        )
        # Every device has the same number of blocks.
        count = self.sizes.data
        blocks = tuple(-(-each // count) * count for each in limits.blocks)
        padded = replace(limits, blocks=blocks)

        def zeros(shape: tuple[int, ...], dtype: str) -> Any:
            return jnp.zeros(shape, jax_dtype(dtype), device=self.place)

        def cache(shape: tuple[int, ...], dtype: str) -> Any:
            sharding = NamedSharding(self.mesh, CACHE_SPEC)
            return jnp.zeros(shape, jax_dtype(dtype), device=sharding)

        with self._allocating(state_bytes(spec, limits, LAYOUT), "state"):
            return paged_state(whole, padded, zeros, cache)

    def memory(self) -> DeviceMemory:
        found = map(device_memory, self.mesh.local_devices)
        return min(found, key=lambda memory: memory.free)

    def kernels(self) -> Iterable[Kernel]:
        return over_mesh(self._single.kernels(), self.sizes)

    def offers(self, kind: type[C]) -> C | None:
        if kind is Mesh:
            count = jax.process_count()
            mesh = Mesh(self.sizes, self.divided, count, self.packed, least)
            return cast("C", mesh)
        if kind in (WeightUpdates, BlockIO):
            return None
        return super().offers(kind)


def over_mesh(kernels: Iterable[Kernel], sizes: Placement) -> Iterable[Kernel]:
    """Adapt the kernels of one device to a mesh."""
    own: tuple[Kernel, ...] = ()
    if sizes.data > 1:
        own += caches.KERNELS
    replaced = {each.op for each in own}
    others = (
        with_part(each) if each.op == "expert_linear" else each
        for each in kernels
        if each.op not in replaced
    )
    collectives = MeshCollectives(sizes)
    return over_ranks((*others, *own), collectives, expert_ranks=sizes.expert)


def least(sizes: Any) -> Any:
    """Return the minimum of each element over all processes."""
    if jax.process_count() == 1:
        return sizes
    return np.asarray(process_allgather(sizes)).reshape(-1, *sizes.shape).min(0)


def spread(mesh: jax.sharding.Mesh, function: Program, shapes: Any) -> Program:
    """Map a program over a mesh; its last argument and result is the state.

    shapes: of the arguments, with their shardings, which those of the state keep. Other
    results are equal on all devices.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, shapes)

    def split(*args: Any) -> tuple[Any, Any]:
        *results, state = function(*args)
        return tuple(results), state

    mapped = jax.shard_map(
        split,
        mesh=mesh,
        in_specs=specs,
        out_specs=(PartitionSpec(), specs[-1]),
        check_vma=False,
    )

    def whole(*args: Any) -> tuple[Any, ...]:
        results, state = mapped(*args)
        return *results, state

    return whole
