"""Which stored tensors make a logical one, and how they are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from inl.dtypes import SIZES, HostArray, wrap
from inl.errors import CheckpointError
from inl.spec.op import Spec
from inl.spec.weights import Param
from inl.weights.checkpoint import Checkpoint
from inl.weights.quant import convert, dequantize, packed_bytes


def stored_tensors(param: Param) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stored tensors that ``param`` takes."""
    if param.stack:
        numbers = range(param.stack)
        return {param.source.replace("{}", str(n)): param.shape[1:] for n in numbers}
    shape = list(param.shape)
    if param.row_slices:
        shape[0] = param.row_slices.rows
    if param.fused_slice:
        shape[param.fused_slice.axis] *= param.fused_slice.total
    return {param.source: tuple(shape)}


def resolved(
    params: Mapping[str, Param], stored: Mapping[str, Spec]
) -> dict[str, Param]:
    """Each of a group's parameters in the form that a checkpoint has anything of.

    Where it has nothing of a parameter, that gets the form of the others, so that what
    is missing is named as this file would have it.
    """
    forms = {name: (param, *param.aliases) for name, param in params.items()}
    found = {
        name: [any(one in stored for one in stored_tensors(form)) for form in each]
        for name, each in forms.items()
    }
    usual = next((hits.index(True) for hits in found.values() if any(hits)), 0)
    chosen: dict[str, Param] = {}
    for name, each in forms.items():
        place = found[name].index(True) if any(found[name]) else usual
        chosen[name] = each[min(place, len(each) - 1)]._replace(aliases=())
    return chosen


def stored_spec(param: Param, stored: Mapping[str, Spec]) -> Spec:
    """The logical shape, in the dtype of what is stored; float32 where that differs."""
    names = stored_tensors(param)
    if not param.row_slices and not param.stack and not param.fused_slice:
        return stored.get(param.source, Spec(param.shape, "float32"))
    dtypes = {stored[name].dtype for name in names if name in stored}
    return Spec(param.shape, dtypes.pop() if len(dtypes) == 1 else "float32")


def check_finite(array: HostArray, where: str) -> None:
    """Raise :class:`CheckpointError` at the first NaN or infinity."""
    values = dequantize(array, where)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        place = tuple(int(index) for index in wrong[0])
        raise CheckpointError(
            f"{where}: found {values[place]} at {list(place)}; accepted: finite numbers"
        )


def read_pieces(
    checkpoint: Checkpoint, param: Param, shape: tuple[int, ...], rank: int, dtype: str
) -> HostArray:
    """One rank's part [E, ...] of ``param``, put together a piece of axis 0 at a time.

    Plain numbers become ``dtype`` on the way, so that they are held once. Packed ones
    stay as they are where all are of one kind and no block is cut.
    """
    kind = _kind(checkpoint, param, shape, dtype)
    width = packed_bytes(shape[-1:], kind) if kind not in SIZES else shape[-1]
    held = np.dtype({"bfloat16": "uint16"}.get(kind, kind if kind in SIZES else "u1"))
    out = np.empty((*shape[:-1], width), held)
    for index, piece in enumerate(_pieces(checkpoint, param)):
        mine = _cut(piece, param, shape, rank)
        if kind in SIZES:
            mine = convert(mine, kind, param.source)
        out[index] = mine.data.reshape(out[index].shape)
    out.flags.writeable = False
    return HostArray(out, kind, shape)


def _kind(
    checkpoint: Checkpoint, param: Param, shape: tuple[int, ...], dtype: str
) -> str:
    """How the pieces are held: as they are stored if that is packed, else ``dtype``."""
    kinds = {checkpoint.spec(name)[0] for name in stored_tensors(param)}
    if len(kinds) > 1 or shape[-1] != param.shape[-1]:
        return dtype
    kind = kinds.pop()
    return dtype if kind in SIZES else kind


def _pieces(checkpoint: Checkpoint, param: Param) -> Iterator[HostArray]:
    """What is stored for each place of axis 0; its pages are dropped after use."""
    if param.stack:
        for name in stored_tensors(param):
            yield checkpoint.tensor(name)
            checkpoint.drop(name)
        return
    whole = checkpoint.tensor(param.source)
    for index in range(param.shape[0]):
        yield HostArray(whole.data[index], whole.dtype, whole.shape[1:])


def _cut(
    piece: HostArray, param: Param, shape: tuple[int, ...], rank: int
) -> HostArray:
    """The part of a piece that is the parameter's, and of that the rank's."""
    if param.fused_slice:
        size = param.shape[param.fused_slice.axis]
        piece = _slice(
            piece, param.fused_slice.axis - 1, param.fused_slice.position * size, size
        )
    if shape != param.shape:
        assert param.axis, "experts are not shared out: each is cut"
        size = shape[param.axis]
        piece = _slice(piece, param.axis - 1, rank * size, size)
    return piece


def _slice(piece: HostArray, axis: int, start: int, size: int) -> HostArray:
    """``size`` entries of an axis; a packed row is decoded where it is cut."""
    shape = list(piece.shape)
    shape[axis] = size
    if axis < len(shape) - 1:
        index = (slice(None),) * axis + (slice(start, start + size),)
        return HostArray(piece.data[index], piece.dtype, tuple(shape))
    if piece.dtype not in SIZES:
        piece = wrap(dequantize(piece))
    return HostArray(piece.data[..., start : start + size], piece.dtype, tuple(shape))
