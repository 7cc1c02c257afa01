"""Executes a weight plan: read, shard, decode or keep packed, lay out, let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import SIZES, HostArray, wrap
from inl.errors import CheckpointError, OutOfMemory
from inl.spec.op import CATALOG, Spec, nbytes
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Param
from inl.weights.checkpoint import Checkpoint
from inl.weights.plan import WeightPlan
from inl.weights.quant import convert, decoder, dequantize
from inl.weights.sources import check_finite, read_pieces, stored_tensors

if TYPE_CHECKING:
    from inl.backend.base import Backend

Progress = Callable[[int, int], None]

MATRIX = 2
"""Axes of a matrix."""
SHARED = 1 << 16
"""Numbers from which on a tensor is kept once."""
INDICES = ("int32", "int64")
"""Dtypes of tables that are looked up in, not computed with."""


def stored_specs(checkpoint: Checkpoint) -> dict[str, Spec]:
    """Dtype and shape of every tensor of a checkpoint."""
    specs: dict[str, Spec] = {}
    for name in checkpoint.names():
        dtype, shape = checkpoint.spec(name)
        specs[name] = Spec(shape, dtype)
    return specs


def load_weights(
    tree: Any,
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: str,
    *,
    rank: int = 0,
    progress: Progress | None = None,
) -> Any:
    """Turn a tree of :class:`Planned` groups into tensors on the backend.

    Every group is read, cut for ``rank``, laid out by its kernel (or left plain, in
    ``dtype``), and its host memory dropped before the next; as many at once as the
    backend's traits say. ``progress`` is told (groups done, groups). A tensor used
    plainly by several groups is kept once.
    """
    plan = list(leaves(tree))
    total = len(plan)
    shared: dict[Param, Any] = {}

    def load(number: int, planned: WeightPlan) -> Any:
        group: dict[str, HostArray | None] = {}
        for name, param in planned.group.params.items():
            group[name] = read_shard(checkpoint, planned, param, rank, dtype)
        try:
            if planned.kernel and planned.kernel.pack:
                result = planned.kernel.pack(group, backend, dtype)
            else:
                result = _plain(planned, group, backend, dtype, shared)
        except OutOfMemory as error:
            name = next(iter(planned.group.params.values())).source
            size = sum(nbytes(each.specs(dtype)) for each in plan)
            raise OutOfMemory(
                f"weights: {name}, group {number} of {total}: {error} (all weights "
                f"in {dtype} are about {size} bytes)"
            ) from error
        for param in planned.group.params.values():
            for source in stored_tensors(param):
                checkpoint.drop(source)
        return result

    loaded = []
    for result in _each(load, plan, backend.traits.readers):
        loaded.append(result)
        if progress:
            progress(len(loaded), total)
    found = iter(loaded)
    return tree_map(lambda _: next(found), tree)


def _each(
    load: Callable[[int, WeightPlan], Any], plan: Sequence[WeightPlan], readers: int
) -> Iterator[Any]:
    """What ``load`` makes of (number from 1, group), in order."""
    if readers == 1:
        yield from map(load, range(1, len(plan) + 1), plan)
        return
    with ThreadPoolExecutor(readers, "inl-weights") as threads:
        try:
            yield from threads.map(load, range(1, len(plan) + 1), plan)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def read_shard(
    checkpoint: Checkpoint, planned: WeightPlan, param: Param, rank: int, dtype: str
) -> HostArray | None:
    """One rank's part of a tensor, as the checkpoint stores it; ``None`` if absent.

    What is put together out of several tensors comes in ``dtype``, unless it is packed.
    Raises :class:`CheckpointError` for a number that the parameter does not allow.
    """
    if param.optional and param.source not in checkpoint.names():
        return None
    _check_kinds(checkpoint, param)
    shape = planned.shard(param)
    if (
        param.stack
        or param.fused_slice
        or (shape != param.shape and len(shape) > MATRIX)
    ):
        array = read_pieces(checkpoint, param, shape, rank, dtype)
    else:
        array = _read_whole(checkpoint, param, shape, rank)
    if param.finite:
        check_finite(array, f"{checkpoint.path}: tensor {param.source}")
    return array


def _check_kinds(checkpoint: Checkpoint, param: Param) -> None:
    """Raise for a kind that nothing decodes, while the tensor's name is known."""
    for name in stored_tensors(param):
        dtype, _ = checkpoint.spec(name)
        if dtype not in SIZES:
            try:
                decoder(dtype, name)
            except CheckpointError as error:
                raise CheckpointError(f"{checkpoint.path}: {error}") from error


def _read_whole(
    checkpoint: Checkpoint, param: Param, shape: tuple[int, ...], rank: int
) -> HostArray:
    whole = adjusted(checkpoint.tensor(param.source), param)
    if shape == whole.shape or param.axis is None:
        return whole
    size = shape[param.axis]
    part = slice(rank * size, (rank + 1) * size)
    if param.axis == 0:
        return HostArray(whole.data[part], whole.dtype, shape)
    if whole.data.shape == whole.shape:
        return HostArray(np.ascontiguousarray(whole.data[:, part]), whole.dtype, shape)
    values = dequantize(whole, param.source)
    return wrap(np.ascontiguousarray(values[:, part]))


def adjusted(whole: HostArray, param: Param) -> HostArray:
    """The logical tensor out of the stored one: its rows, and its offset added.

    Rows move as they are, whatever their packing; an offset is added in float64.
    """
    if param.row_slices is not None:
        rows = [whole.data[start:stop] for start, stop in param.row_slices.spans]
        data = rows[0] if len(rows) == 1 else np.concatenate(rows)
        whole = HostArray(data, whole.dtype, param.shape)
    if param.offset:
        values = dequantize(whole, param.source).astype(np.float64)
        whole = wrap(values + param.offset)
    return whole


def to_dtype(array: HostArray, dtype: str, name: str = "a tensor") -> HostArray:
    """Decode and round to a plain dtype; no copy where it is stored so already."""
    return convert(array, dtype, name)


def _plain(
    planned: WeightPlan,
    group: Mapping[str, HostArray | None],
    backend: Backend,
    dtype: str,
    shared: dict[Param, Any],
) -> Any:
    tensors: dict[str, Any] = {}
    for name, array in group.items():
        param = planned.group.params[name]
        axis = param.axis if planned.ranks > 1 else None
        key = param._replace(axis=axis)
        if array is None:
            continue
        known = shared.get(key) if array.size >= SHARED else None
        if known is None:
            held = "int32" if array.dtype in INDICES else dtype
            made = backend.tensor(to_dtype(array, held, param.source), axis=axis)
            # Another group may have made the same meanwhile.
            known = shared.setdefault(key, made) if array.size >= SHARED else made
        tensors[name] = known
    weights: Any = CATALOG[planned.group.op].weights
    return weights(**tensors)
