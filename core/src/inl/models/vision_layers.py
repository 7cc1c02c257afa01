"""What vision encoders share: sizes, layers, attention and the order of patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.dtypes import SIZES
from inl.errors import CheckpointError
from inl.models import mlp
from inl.models.config import whole
from inl.ops.full_attention import starts_of
from inl.ops.linear import Linear, QkvLinear
from inl.spec.step import Array
from inl.spec.weights import Group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint
    from inl.dtypes import HostArray
    from inl.ops.protocol import Ops

MAX_PATCHES: Final = 1 << 16
"""Most patches of an image."""

N = TypeVar("N")
Change = tuple[tuple[int, ...], Callable[[Sequence["HostArray"]], "HostArray"]]
"""Shape of a tensor, and what makes it of the stored one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """Sizes and constants of one checkpoint."""

    hidden_size: int
    intermediate_size: int
    out_size: int
    layers: int
    heads: int
    patch: int
    """Numbers of a patch."""
    merge: int
    """Patches of a feature: a square."""
    activation: str
    vocab_size: int = 2
    max_tokens: int = MAX_PATCHES
    dtype: str = "float32"
    """Compute dtype; the loader sets it."""


class Layer(NamedTuple, Generic[N]):
    """Parameters of one layer, whose norms are ``N``."""

    norm: N | Group
    qkv: QkvLinear | Group
    out: Linear | Group
    mlp_norm: N | Group
    mlp: mlp.OpenMlp


def hidden_and_heads(hf: Mapping[str, Any], heads: str, lanes: int) -> tuple[int, int]:
    """Read the hidden size and the number of heads, from the field ``heads``.

    Each head has a multiple of ``lanes``. Raises :class:`CheckpointError`.
    """
    hidden, count = whole(hf, "hidden_size"), whole(hf, heads)
    if hidden % count or hidden // count % lanes:
        raise CheckpointError(
            f"config field 'vision_config.{heads}': found {count}, expected heads of "
            f"{hidden} lanes in all, a multiple of {lanes} each"
        )
    return hidden, count


def attention(
    ops: Ops, c: VisionSizes, layer: Layer[Any], x: Array, bounds: Array,
    rope: tuple[Array, Array] | None = None,
) -> Array:  # fmt: skip
    """Return the attention of normed patches [T, H] within the sequences of bounds.

    rope: cosines and sines of the rotation of heads, if there is one.
    """
    tokens, hidden = x.shape
    dim = hidden // c.heads
    parts = ops.qkv_linear(x, layer.qkv)
    q, k, v = (part.reshape(tokens, c.heads, dim) for part in parts)
    if rope is not None:
        q, k = ops.rope(q, k, *rope)
    mixed = ops.full_attention(q, k, v, bounds, scale=dim**-0.5, window=None)
    return ops.linear(mixed.reshape(tokens, hidden), layer.out)


def squares(grid: tuple[int, int], merge: int) -> NDArray[np.intp]:
    """Return row and column of the patches of each feature [2, features, merge].

    grid: rows and columns of patches.
    """
    side = int(merge**0.5)
    rows, columns = grid[0] // side, grid[1] // side
    places = np.indices(grid).reshape(2, rows, side, columns, side)
    found: NDArray[np.intp] = places.transpose(0, 1, 3, 2, 4)
    return found.reshape(2, rows * columns, merge)


def padded(parts: Sequence[NDArray[Any]], size: int, *, axis: int = 0) -> NDArray[Any]:
    """Return parts one after the other, and zeros up to ``size`` along an axis."""
    shape = list(parts[0].shape)
    if len(parts) == 1 and shape[axis] == size:
        return parts[0]
    shape[axis] = size
    joined = np.zeros(shape, np.result_type(*parts))
    used = sum(part.shape[axis] for part in parts)
    np.concatenate(parts, axis, out=joined.swapaxes(0, axis)[:used].swapaxes(0, axis))
    return joined


def sequence_starts(lengths: Sequence[int], rows: int) -> NDArray[np.int32]:
    """Return the bounds [rows + 1] of sequences; those beyond the last are empty."""
    found: NDArray[np.int32] = starts_of([*lengths, *[0] * (rows - len(lengths))])
    return found


def flat_patches(c: VisionSizes) -> Change:
    """Return what makes the convolution of patches a matrix: its stride is its size."""
    shape = c.hidden_size, c.patch
    return shape, lambda stored: replace(
        stored[0], data=stored[0].data.reshape(shape), shape=shape
    )


def changed(checkpoint: Checkpoint, changes: Mapping[str, Change]) -> AdaptedCheckpoint:
    """Return a checkpoint in which the tensors of these names are others.

    They are tensors of numbers: reading a quantized one raises
    :class:`CheckpointError`.
    """

    def numbers_only(name: str) -> Change:
        shape, make = changes[name]

        def made(stored: Sequence[HostArray]) -> HostArray:
            if stored[0].dtype not in SIZES:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {name!r}: found {stored[0].dtype}, "
                    f"accepted: {', '.join(SIZES)}"
                )
            return make(stored)

        return shape, made

    pieces = {
        name: Piece((name,), *numbers_only(name))
        if name in changes
        else Piece((name,), checkpoint.spec(name)[1])
        for name in checkpoint.names()
    }
    return AdaptedCheckpoint(checkpoint, pieces)
