"""Stored tensors of a logical parameter: lookup, slicing, stacking and sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from inl.checkpoints.blocks.dtypes import convert, dequantize, packed_bytes
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import SIZES, HostArray, wrap
from inl.spec.op import Spec
from inl.spec.weights import Param


def stored_tensors(param: Param) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the stored tensors of a parameter."""
    if param.stack:
        numbers = range(param.stack)
        return {param.source.replace("{}", str(n)): param.shape[1:] for n in numbers}
    shape = list(param.shape)
    if param.order:
        shape[0] = len(set(param.order))
    if param.row_slices:
        shape[0] = param.row_slices.rows
    if param.fused_slice:
        shape[param.fused_slice.axis] *= param.fused_slice.total
    return {param.source: tuple(shape)}


def resolved(
    params: Mapping[str, Param], stored: Mapping[str, Spec]
) -> dict[str, Param]:
    """Resolve the aliases of a group's parameters against a checkpoint.

    Each parameter takes the first alias with a stored tensor. One without any takes
    the alias index of the others, so that errors name the tensor as this file would.
    """
    forms = {name: (param, *param.aliases) for name, param in params.items()}
    present = {
        name: [any(one in stored for one in stored_tensors(form)) for form in each]
        for name, each in forms.items()
    }
    default = next((hits.index(True) for hits in present.values() if any(hits)), 0)
    chosen: dict[str, Param] = {}
    for name, each in forms.items():
        index = present[name].index(True) if any(present[name]) else default
        chosen[name] = each[min(index, len(each) - 1)]._replace(aliases=())
    return chosen


def stored_spec(param: Param, stored: Mapping[str, Spec]) -> Spec:
    """Return the logical shape with the stored dtype; float32 if dtypes differ."""
    names = stored_tensors(param)
    changed = param.row_slices or param.stack or param.fused_slice or param.order
    if not changed:
        return stored.get(param.source, Spec(param.shape, "float32"))
    dtypes = {stored[name].dtype for name in names if name in stored}
    return Spec(param.shape, dtypes.pop() if len(dtypes) == 1 else "float32")


def read_pieces(
    checkpoint: Checkpoint,
    param: Param,
    shape: tuple[int, ...],
    rank: int,
    dtype: str,
    *,
    expert_rank: int = 0,
) -> HostArray:
    """Assemble one rank's shard [E, ...] of a parameter, one index of axis 0 at a time.

    rank, expert_rank: indices along the axes "tensor" and "expert"; only experts of
    this rank are read.

    Plain tensors are converted to ``dtype`` piece by piece, so only one copy exists.
    Quantized ones stay so if all have one dtype and the shard splits no block.
    """
    target = _target_dtype(checkpoint, param, shape, dtype)
    plain = target in SIZES
    width = shape[-1] if plain else packed_bytes(shape[-1:], target)
    element = {"bfloat16": "uint16"}.get(target, target) if plain else "uint8"
    out = np.empty((*shape[:-1], width), np.dtype(element))
    is_part = shape[0] != param.shape[0]
    first = expert_rank * shape[0] if is_part else 0
    own = range(first, first + shape[0])
    for index, piece in enumerate(_pieces(checkpoint, param, own)):
        shard = _shard(piece, param, shape, rank)
        if plain:
            shard = convert(shard, target, param.source)
        out[index] = shard.data.reshape(out[index].shape)
    out.flags.writeable = False
    return HostArray(out, target, shape)


def _target_dtype(
    checkpoint: Checkpoint, param: Param, shape: tuple[int, ...], dtype: str
) -> str:
    """Return the stored dtype if it is quantized and can be kept, else ``dtype``."""
    stored = {checkpoint.spec(name)[0] for name in stored_tensors(param)}
    if len(stored) > 1 or shape[-1] != param.shape[-1]:
        return dtype
    (only,) = stored
    return dtype if only in SIZES else only


def _pieces(
    checkpoint: Checkpoint, param: Param, indices: range
) -> Iterator[HostArray]:
    """Yield the stored tensor of each of these indices of axis 0."""
    stored = [param.order[index] for index in indices] if param.order else indices
    if param.stack:
        names = [*stored_tensors(param)]
        for index in stored:
            yield checkpoint.tensor(names[index])
        return
    whole = checkpoint.tensor(param.source)
    for index in stored:
        yield HostArray(whole.data[index], whole.dtype, whole.shape[1:])


def _shard(
    piece: HostArray, param: Param, shape: tuple[int, ...], rank: int
) -> HostArray:
    """Select the parameter's slice of a piece, and of that the rank's shard."""
    if param.fused_slice:
        size = param.shape[param.fused_slice.axis]
        piece = _slice(
            piece, param.fused_slice.axis - 1, param.fused_slice.position * size, size
        )
    if shape[1:] != param.shape[1:]:
        assert param.axis, "axis 0 has the experts"
        size = shape[param.axis]
        piece = _slice(piece, param.axis - 1, rank * size, size)
    return piece


def _slice(piece: HostArray, axis: int, start: int, size: int) -> HostArray:
    """Select ``size`` entries of an axis; quantized rows are decoded to be sliced."""
    shape = list(piece.shape)
    shape[axis] = size
    if axis < len(shape) - 1:
        index = (slice(None),) * axis + (slice(start, start + size),)
        return HostArray(piece.data[index], piece.dtype, tuple(shape))
    if piece.dtype not in SIZES:
        piece = wrap(dequantize(piece))
    return HostArray(piece.data[..., start : start + size], piece.dtype, tuple(shape))
