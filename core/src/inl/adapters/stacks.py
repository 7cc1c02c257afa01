"""Adapters on a device: the stacked matrices, which change while an engine serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.adapters.folder import Adapter, LoraPair, read_adapter
from inl.adapters.weights import (
    AdaptedWeights,
    AdapterShape,
    Site,
    attach,
    modules_of,
)
from inl.backend.base import WeightUpdates
from inl.dtypes import HostArray, cast, widen
from inl.errors import CheckpointError
from inl.ops.lora import Lora
from inl.placement.mesh import TENSOR, mesh_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from inl.backend.base import Backend


class AdapterStacks:
    """The adapters of a runner, by number from 1, and their matrices on its device.

    plans: tree of :class:`~inl.weights.plan.WeightPlan` with adapted layers. rank: of
    the tensor-parallel group. A mesh divides whole matrices among its devices.
    """

    def __init__(
        self, plans: Any, backend: Backend, dtype: str, shape: AdapterShape, rank: int
    ) -> None:
        self.shape = shape
        self._plans, self._backend, self._dtype = plans, backend, dtype
        self._rank = rank
        self._mesh = mesh_of(backend)
        self._adapters: dict[int, Adapter] = {}

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """[N, K] of each module that may have an adapter, by its name."""
        return modules_of(self._plans)

    def attached(self, weights: Any) -> AdaptedWeights:
        """Return a model's weights with matrices of zeros."""
        put = self._backend.tensor
        selection = np.zeros((self.shape.adapters + 1, self.shape.columns), np.float32)
        columns = np.arange(self.shape.columns)
        for number in range(1, self.shape.adapters + 1):
            selection[number, columns // self.shape.rank == number - 1] = 1
        return AdaptedWeights(
            attach(self._plans, weights, self._placed),
            put(cast(selection, self._dtype)),
        )

    def read(self, path: str | Path, digest: str) -> Adapter:
        """Read an adapter from its folder and check that it is the expected one."""
        adapter = read_adapter(path, self.modules, self.shape.rank)
        if adapter.digest != digest:
            raise CheckpointError(
                f"adapter {path}: found contents with digest {adapter.digest[:16]}, "
                f"expected {digest[:16]}: it has changed meanwhile; load it again"
            )
        return adapter

    def load(
        self, weights: AdaptedWeights, number: int, adapter: Adapter
    ) -> AdaptedWeights:
        """Return the weights with another adapter of this number.

        They are the same tree if the backend has overwritten the tensors. After an
        exception the number has no adapter; all others are as before.
        """
        before = self._adapters.get(number)
        touched = set(adapter.modules) | set(before.modules if before else ())
        updates = self._backend.offers(WeightUpdates)
        changed = False

        def make(site: Site, old: Lora) -> Lora:
            nonlocal changed
            if site.module not in touched:
                return old
            if updates is None:
                new = self._placed(site)
            else:
                new = Lora(*map(updates.replace, old, self._pair(site)))
            changed |= any(a is not b for a, b in zip(old, new, strict=True))
            return new

        self._adapters[number] = adapter
        try:
            model = _replaced(self._plans, weights.model, make)
        except BaseException:
            # Matrices of this number may be new already; nothing refers to it.
            del self._adapters[number]
            raise
        return weights._replace(model=model) if changed else weights

    def _placed(self, site: Site) -> Lora:
        """Copy the stacked matrices of one site to the device or the mesh."""
        a, b = self._pair(site)
        if self._mesh is None:
            return Lora(self._backend.tensor(a), self._backend.tensor(b))
        rows, columns = (
            TENSOR if site.ranks > 1 and site.param.axis == axis else None
            for axis in range(2)
        )
        place = self._mesh.place
        return Lora(place(a, (None, columns), False), place(b, (rows, None), False))

    def _pair(self, site: Site) -> tuple[HostArray, HostArray]:
        """Return the stacked matrices of one site, on this rank or of a whole mesh."""
        rows, columns = site.param.shape
        a = np.zeros((self.shape.columns, columns), np.float32)
        b = np.zeros((rows, self.shape.columns), np.float32)
        for number, adapter in self._adapters.items():
            pair = adapter.modules.get(site.module)
            if pair is None:
                continue
            start = (number - 1) * self.shape.rank
            stop = start + len(pair.a)
            a[start:stop], b[:, start:stop] = pair.a, _rows(pair, site)
        axis, part = site.param.axis, self._rank
        if self._mesh is not None:
            axis = None
        rows, columns = site.shard_shape()
        if axis == 0:
            b = b[part * rows : (part + 1) * rows]
        elif axis == 1:
            a = a[:, part * columns : (part + 1) * columns]
        return self._cast(a, site), self._cast(b, site)

    def _cast(self, values: NDArray[np.float32], site: Site) -> HostArray:
        with np.errstate(over="ignore"):
            array = cast(np.ascontiguousarray(values), self._dtype)
        if not np.isfinite(widen(array)).all():
            raise CheckpointError(
                f"adapter of {site.module}: has values beyond {self._dtype}; choose "
                "another dtype"
            )
        return array


def _rows(pair: LoraPair, site: Site) -> NDArray[np.float32]:
    """Return the rows of B that belong to a matrix, which may be a part of a module."""
    slices = site.param.row_slices
    if slices is None:
        return pair.b
    return np.concatenate([pair.b[start:stop] for start, stop in slices.spans])


def _replaced(plans: Any, weights: Any, make: Callable[[Site, Lora], Lora]) -> Any:
    """Return weights with new ``Lora`` tuples, made from the old ones."""
    old = iter(_loras(weights))
    return attach(plans, weights, lambda site: make(site, next(old)))


def _loras(tree: Any) -> list[Lora]:
    if isinstance(tree, Lora):
        return [tree]
    if not isinstance(tree, tuple):
        return []
    return [lora for item in tree for lora in _loras(item)]
