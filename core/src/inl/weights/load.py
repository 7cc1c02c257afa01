"""Weight loader: reads, shards, decodes or packs each group of a weight plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.checkpoints.blocks.dtypes import (
    BLOCKS,
    convert,
    decoder,
    dequantize,
    packed_bytes,
)
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.wrapped import CachedCheckpoint
from inl.dtypes import SIZES, HostArray, wrap
from inl.errors import CheckpointError, OutOfMemory
from inl.placement.mesh import EXPERT, first_of, mesh_of
from inl.spec.op import CATALOG, Spec, nbytes
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Param
from inl.weights.finite import check_finite
from inl.weights.plan import WeightPlan
from inl.weights.sources import read_pieces, stored_tensors
from inl.weights.unread import DividedArray, UnreadArray

if TYPE_CHECKING:
    from inl.backend.base import Backend

MATRIX_RANK = 2
SHARED_ELEMENTS = 1 << 16
"""Plain tensors of at least this many elements are shared between groups."""
INDEX_DTYPES = ("int32", "int64")
"""Dtypes of lookup tables; they are not converted to the compute dtype."""


def stored_specs(checkpoint: Checkpoint) -> dict[str, Spec]:
    """Return dtype and shape of every tensor of a checkpoint, by name."""
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
    expert_rank: int = 0,
    partial_rank: int | None = None,
    check: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Load a tree of :class:`WeightPlan` groups onto the backend.

    Each group is read, sharded for ``rank`` (along "tensor") and ``expert_rank`` (along
    "data" and "expert"), and packed by its kernel, or converted to ``dtype`` without
    one; its host memory is released before the next group. Of a mesh of several
    processes each reads what its own devices have. Up to ``backend.traits.readers``
    groups are loaded concurrently. A plain tensor that several groups use is loaded
    once. check: whether to raise
    :class:`~inl.errors.CheckpointError` for NaN and infinity. progress: called with
    (bytes done, bytes in total) of the stored tensors before the first group and after
    each group. partial_rank: index among the ranks whose results are summed, by default
    ``expert_rank``.
    """
    plan = list(leaves(tree))
    shared: dict[Param, Any] = {}
    mesh = mesh_of(backend)

    def read(
        planned: WeightPlan, rank: int = rank, source: Checkpoint = checkpoint
    ) -> dict[str, HostArray | None]:
        return {
            name: read_shard(
                source,
                planned,
                param,
                rank,
                dtype,
                expert_rank=expert_rank,
                partial_rank=partial_rank,
                check=check,
            )
            for name, param in planned.group.params.items()
        }

    def load(number: int, planned: WeightPlan) -> Any:
        pack = planned.kernel.pack if planned.kernel else None
        try:
            if pack and mesh:
                # Each rank's part is padded by itself.
                once = CachedCheckpoint(checkpoint)
                result = mesh.packed(
                    lambda rank, one: pack(read(planned, rank, once), one, dtype)
                )
            elif pack:
                result = pack(read(planned), backend, dtype)
            else:
                if mesh is None:
                    group = read(planned)
                elif mesh.processes == 1:
                    group = read(planned.whole)  # the mesh divides it
                else:
                    group = _divided(planned, checkpoint, dtype, check=check)
                result = _plain(planned, group, backend, dtype, shared)
        except OutOfMemory as error:
            name = next(iter(planned.group.params.values())).source
            size = sum(nbytes(each.specs(dtype)) for each in plan)
            raise OutOfMemory(
                f"weights: {name}, group {number} of {len(plan)}: {error} (all weights "
                f"in {dtype} are about {size} bytes)"
            ) from error
        return result

    sizes = [group_bytes(checkpoint, planned) for planned in plan]
    if progress:
        progress(0, sum(sizes))
    loaded = []
    for result in _in_order(load, plan, backend.traits.readers):
        loaded.append(result)
        if progress:
            progress(sum(sizes[: len(loaded)]), sum(sizes))
    results = iter(loaded)
    return tree_map(lambda _: next(results), tree)


def _divided(
    planned: WeightPlan, checkpoint: Checkpoint, dtype: str, *, check: bool
) -> dict[str, HostArray | None]:
    """Return the tensors of a group; those that the tensor axis divides, by part."""
    by_rank = replace(planned, expert_ranks=1)

    def divided(name: str, param: Param) -> HostArray | None:
        absent = param.optional and param.source not in checkpoint.names()
        if absent or param.axis is None or planned.ranks == 1:
            return read_shard(checkpoint, planned.whole, param, 0, dtype, check=check)
        target = _loaded_dtype(planned.stored[name], param, dtype)

        def read(rank: int) -> HostArray:
            part = read_shard(checkpoint, by_rank, param, rank, dtype, check=check)
            assert part is not None, "it is there"
            return to_dtype(part, target, param.source)

        return DividedArray(target, param.shape, param.axis, planned.ranks, read)

    return {name: divided(name, each) for name, each in planned.group.params.items()}


def _loaded_dtype(stored: str, param: Param, dtype: str) -> str:
    """Return the dtype of a plain tensor on a device."""
    if param.wide:
        return "float32"
    return "int32" if stored in INDEX_DTYPES else dtype


def group_bytes(checkpoint: Checkpoint, planned: WeightPlan) -> int:
    """Return the bytes of the stored tensors of a group, over all ranks."""
    names = {
        name
        for param in planned.group.params.values()
        for name in stored_tensors(param)
    }
    specs = [checkpoint.spec(name) for name in names & set(checkpoint.names())]
    return sum(packed_bytes(shape, dtype) for dtype, shape in specs)


def _in_order(
    load: Callable[[int, WeightPlan], Any], plan: Sequence[WeightPlan], readers: int
) -> Iterator[Any]:
    """Yield ``load(number, group)`` in plan order; numbers count from 1."""
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
    checkpoint: Checkpoint,
    planned: WeightPlan,
    param: Param,
    rank: int,
    dtype: str,
    *,
    expert_rank: int = 0,
    partial_rank: int | None = None,
    check: bool = True,
) -> HostArray | None:
    """Return one rank's shard of a parameter, or ``None`` for an absent optional one.

    A matrix as stored is read when it is used: none is with weights from a cache.
    Keeps the stored dtype, but a parameter combined from several tensors is in
    ``dtype`` unless all are quantized alike. Raises :class:`CheckpointError` for a
    dtype without a decoder, and for non-finite values if ``check`` or ``param.finite``
    is set.
    """
    if param.optional and param.source not in checkpoint.names():
        return None
    _check_dtypes(checkpoint, param)
    shape = planned.shard(param)
    where = f"{checkpoint.path}: tensor {param.source}"
    check_numbers = partial(check_finite, where=where)
    if _is_stored_whole(checkpoint, param, shape):
        checked = check_numbers if check or param.finite else None
        return UnreadArray(checkpoint, param.source, checked)
    if (
        param.stack
        or param.fused_slice
        or param.order
        or (shape != param.shape and len(shape) > MATRIX_RANK)
    ):
        array = read_pieces(
            checkpoint, param, shape, rank, dtype, expert_rank=expert_rank
        )
    else:
        array = _read_whole(checkpoint, param, shape, rank)
    sums = expert_rank if partial_rank is None else partial_rank
    if (param.partial and rank) or (param.expert_partial and sums):
        zeros = np.zeros(array.data.shape, array.data.dtype)
        array = HostArray(zeros, array.dtype, array.shape)
    if check or param.finite:
        check_numbers(array)
    return array


def _is_stored_whole(
    checkpoint: Checkpoint, param: Param, shape: tuple[int, ...]
) -> bool:
    """Whether a parameter is a matrix exactly as the checkpoint stores it."""
    changed = param.stack or param.fused_slice or param.row_slices or param.offset
    if (
        changed
        or param.order
        or param.partial
        or param.expert_partial
        or len(shape) != MATRIX_RANK
    ):
        return False
    return checkpoint.spec(param.source)[1] == shape


def _check_dtypes(checkpoint: Checkpoint, param: Param) -> None:
    """Raise for a dtype without a decoder, with the tensor's name in the message."""
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
    if param.row_slices and param.axis == 0 and shape != param.shape:
        own = param.row_slices.part(rank * shape[0], (rank + 1) * shape[0])
        own_param = param._replace(row_slices=own, shape=shape)
        return adjusted(checkpoint.tensor(param.source), own_param)
    if param.axis == 0 and shape != param.shape:
        start, stop = rank * shape[0], (rank + 1) * shape[0]
        return adjusted(checkpoint.rows(param.source, start, stop), param)
    whole = adjusted(checkpoint.tensor(param.source), param)
    if shape == whole.shape or param.axis is None:
        return whole
    size = shape[param.axis]
    shard = slice(rank * size, (rank + 1) * size)
    elements, block = BLOCKS.get(whole.dtype, (1, 1))
    if size % elements == 0:
        data = whole.data.reshape(whole.shape[0], -1, block)
        part = data[:, shard.start // elements : shard.stop // elements]
        stored = np.ascontiguousarray(part).reshape(len(part), -1)
        return HostArray(stored, whole.dtype, shape)
    values = dequantize(whole, param.source)
    return wrap(np.ascontiguousarray(values[:, shard]))


def adjusted(whole: HostArray, param: Param) -> HostArray:
    """Convert a stored tensor to the logical one: select rows, add the offset.

    Rows are selected without decoding them; the offset is added in float64.
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
    """Convert to a plain dtype; returns ``array`` itself if it has that dtype."""
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
        large = array.size >= SHARED_ELEMENTS
        tensor = shared.get(key) if large else None
        if tensor is None:
            target = _loaded_dtype(array.dtype, param, dtype)
            host = to_dtype(array, target, param.source)
            mesh = mesh_of(backend)
            if mesh is None:
                tensor = backend.tensor(host)
            else:
                axes = planned.axes(param)
                if param.expert_partial and (experts := mesh.sizes.expert) > 1:
                    host, axes = first_of(host, experts), (EXPERT, *axes[1:])
                tensor = mesh.place(host, axes, param.partial)
            if large:  # another thread may have stored the same tensor meanwhile
                tensor = shared.setdefault(key, tensor)
        tensors[name] = tensor
    weights: Any = CATALOG[planned.group.op].weights
    return weights(**tensors)
