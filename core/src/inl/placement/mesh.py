"""Meshes: the devices of a placement that one program drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.backend.collectives import DATA as DATA
from inl.backend.collectives import EXPERT as EXPERT
from inl.backend.collectives import TENSOR as TENSOR
from inl.dtypes import HostArray
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.placement.placement import Placement

EXPERT_OPS = ("experts", "expert_linear")
"""Ops whose weights are divided over the expert axis: axis 0 of each."""


class Meshes(NamedTuple):
    """Capability: opens the device and those after it as a mesh for one program."""

    over: Callable[[Placement], Any]
    """Returns a backend that offers :class:`Mesh`. Raises
    :class:`~inl.errors.BackendUnavailable` where there are fewer devices."""
    axes: tuple[str, ...] = (DATA, TENSOR, EXPERT)
    """Axes along which its programs divide a model."""


class Mesh(NamedTuple):
    """Capability of a backend whose programs run on all devices of a mesh.

    Its kernels reduce over the mesh. :meth:`~inl.backend.base.Backend.state` takes the
    specs of one device's heads.
    """

    sizes: Placement
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


def first_of(data: HostArray, parts: int) -> HostArray:
    """Return an array [parts * n, ...]: the given one of [n, ...], then zeros."""
    first = data.data
    zeros = np.zeros(((parts - 1) * first.shape[0], *first.shape[1:]), first.dtype)
    shape = data.shape[0] * parts, *data.shape[1:]
    return HostArray(np.concatenate([first, zeros]), data.dtype, shape)
