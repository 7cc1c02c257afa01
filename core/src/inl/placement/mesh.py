"""Meshes: devices in up to three dimensions that one program drives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import RequestError
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.dtypes import HostArray

DATA, TENSOR, EXPERT = "data", "tensor", "expert"

EXPERT_OP = "experts"
"""Op whose weights are divided over the expert axis of a mesh."""


class MeshSizes(NamedTuple):
    """Number of devices along each axis of a mesh."""

    data: int = 1
    """Devices that share the blocks of the caches."""
    tensor: int = 1
    """Devices that share the heads and the inner lanes of each layer."""
    expert: int = 1
    """Devices that share the experts of each layer."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self)

    def __str__(self) -> str:
        named = self._asdict().items()
        return ",".join(f"{name}={size}" for name, size in named if size > 1) or "1"


def parse_mesh(text: object) -> MeshSizes:
    """Read sizes such as "tensor=4,data=2"; an axis that is not named has size 1.

    Raises :class:`~inl.errors.RequestError`.
    """
    axes = MeshSizes._fields
    sizes: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else ("",):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in axes or name in sizes or not is_size(size):
            raise RequestError(
                f"mesh: found {text!r:.80}, accepted: AXIS=SIZE separated by commas, "
                f"such as tensor=4,data=2; each of {', '.join(axes)} at most once, and "
                "sizes of 1 or more"
            )
        sizes[name] = int(size)
    return MeshSizes(**sizes)


def is_size(text: str) -> bool:
    """Whether the text is a whole number of 1 to 9999."""
    return text.isascii() and text.isdigit() and 0 < int(text[:5]) < 10_000


class Meshes(NamedTuple):
    """Capability: opens the device and those after it as a mesh for one program."""

    over: Callable[[MeshSizes], Any]
    """Returns a backend that offers :class:`Mesh`. Raises
    :class:`~inl.errors.BackendUnavailable` where there are fewer devices."""


class Mesh(NamedTuple):
    """Capability of a backend whose programs run on all devices of a mesh.

    Its kernels reduce over the mesh. :meth:`~inl.backend.base.Backend.state` takes the
    specs of one device's heads.
    """

    sizes: MeshSizes
    place: Callable[[HostArray, tuple[str | None, ...], bool], Array]
    """Copies a whole array to the devices, which is called with the array; the mesh
    axis, or ``None``, over which each of its axes is divided; and whether only the
    first device along the tensor axis has its values, and the others have zeros."""
    processes: int
    """Processes that run the same program, each on its devices of the mesh."""
    packed: Callable[[Callable[[int, Any], Any]], Any]
    """Takes a function that packs the weights of one rank along the tensor axis, which
    is called with the rank and a backend of one of its devices; returns the packed
    weights of all devices."""
    least: Callable[[Any], Any]
    """Takes an int32 array of this process and returns the minimum of each element over
    all processes, which make the same call."""


def mesh_of(backend: Any) -> Mesh | None:
    """Return the mesh of a backend, or ``None`` for one of a single device."""
    found: Mesh | None = backend.offers(Mesh)
    return found


def axes_of(
    shape: tuple[int, ...], tensor_axis: int | None, expert_axis: int | None
) -> tuple[str | None, ...]:
    """Return the mesh axis over which each axis of an array is divided."""
    named: Mapping[int | None, str] = {expert_axis: EXPERT, tensor_axis: TENSOR}
    return tuple(named.get(axis) for axis in range(len(shape)))
