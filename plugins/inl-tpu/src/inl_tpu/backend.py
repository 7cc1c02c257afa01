"""Backend of one TPU, or of one device of another JAX platform."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar, cast, final

import jax

from inl.backend.base import Traits
from inl.backend.tunable import Tunable
from inl.cache_dir.location import cache_folder
from inl.device import Device
from inl.errors import BackendUnavailable
from inl.placement.mesh import Meshes
from inl.placement.placement import Placement
from inl_jax import pallas
from inl_jax.backend import JaxBackend
from inl_jax.mesh.backend import MeshBackend
from inl_jax.mesh.distributed import devices_of_hosts, join
from inl_jax.programs import Compiler, use_disk_cache
from inl_tpu.settings import VARIABLE, platform
from inl_tpu.tuner import Tuner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl.backend.collectives import Rank
    from inl.spec.kernel import Kernel

C = TypeVar("C")

TRAITS = Traits(
    dtypes=("bfloat16", "float32"),
    kv_dtypes=("bfloat16", "float32", "int8"),
    block_size=32,
    depth=2,
    decode_steps=8,
    readers=min(os.cpu_count() or 1, 4),
)


@final
class TpuBackend(JaxBackend):
    """One TPU.

    ``INL_TPU_PLATFORM=cpu`` or ``cuda`` runs the same programs on JAX's other
    platforms. Raises :class:`BackendUnavailable` where JAX cannot use the device.
    """

    traits = TRAITS

    def __init__(self, device: Device) -> None:
        self.device = device
        target = platform()
        self.place = open_device(device, target)
        if target == "cpu":
            # XLA's products of bfloat16 are slow on the CPU, and its steps long
            # compared with the host's work between them.
            self.traits = TRAITS._replace(
                dtypes=("float32", "bfloat16"), decode_steps=1
            )
        self._target = target
        self.compiler = Compiler(self.out_of_memory)
        use_disk_cache(cache_folder() / "jax")

    def offers(self, kind: type[C]) -> C | None:
        if kind is Meshes:
            return cast("C", Meshes(self._over))
        if kind is Tunable and self._target == "tpu":
            return cast("C", Tuner(cast("jax.Device", self.place)))
        return super().offers(kind)

    def _over(self, sizes: Placement) -> MeshBackend:
        if sizes.devices:
            named = [open_device(Device(name), self._target) for name in sizes.devices]
            return MeshBackend(self, named, sizes)
        devices = jax.devices(self._target)[self.device.index :]
        if len(devices) < sizes.count:
            raise BackendUnavailable(
                f"{self.device}: mesh {sizes} needs {sizes.count} devices; JAX finds "
                f"{len(devices)} of platform {self._target} from this one on"
            )
        return MeshBackend(self, devices[: sizes.count], sizes)

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        if self._target == "tpu":
            yield from pallas.kernels()


def open_host(device: Device, placement: Placement, rank: Rank) -> MeshBackend:
    """Open the devices of this host in a mesh over several.

    Blocks until all have joined. Raises :class:`~inl.errors.RunnerError`, and
    :class:`BackendUnavailable`.
    """
    target = platform()
    join(rank, target)
    single = TpuBackend(device)
    devices = devices_of_hosts(device, target, placement, rank)
    return MeshBackend(single, devices, placement)


def open_device(device: Device, target: str) -> jax.Device:
    """Return the JAX device of a platform.

    Raises :class:`BackendUnavailable` with the reason that JAX gives.
    """
    try:
        found = jax.local_devices(backend=target)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise BackendUnavailable(
            f"{device}: JAX {jax.__version__} cannot use platform {target}: {reason}"
            f"; check JAX_PLATFORMS, and that no other process holds the device"
        ) from error
    if device.index >= len(found):
        raise BackendUnavailable(
            f"{device}: JAX finds {len(found)} devices of platform {target}; "
            f"{VARIABLE} selects the platform"
        )
    return found[device.index]
