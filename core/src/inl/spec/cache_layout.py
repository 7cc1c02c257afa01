"""Contents of a cache in host memory, in one layout for all backends and numbers of
ranks.

Blocks of a cache group have the part "cells", ``[layers, 2, n, block_size, kv_heads,
head_dim]`` in the dtype of the cache: keys, then values. In int8, a number is its cell
times its entry of "scales", float32 ``[layers, 2, n, block_size, kv_heads]``; in
float8_e4m3, times the constant of its layer in "scales", float32 ``[layers, 2]``. The
state of a slot has one part for each name, of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import E4M3, SIZES, HostArray
from inl.errors import ProtocolError
from inl.spec.cache import Paged, Slotted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[Any]

Empty = Callable[[tuple[int, ...], str], "Bits"]
"""Allocates an array of a shape and a dtype of NumPy."""

Parts = Mapping[str, HostArray]
"""Contents of blocks or of a slot, by the name of the part."""

SLOT_GROUP = -1
"""Stands for the slots where a cache group is named."""

BITS = {"bfloat16": "uint16", E4M3: "uint8"}
"""Dtypes that NumPy lacks -> those of their bits."""

HEADS, BLOCKS = 4, 2
"""Axes of cells and of int8 scales."""


class Part(NamedTuple):
    """Dtype and shape of a part."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * SIZES.get(self.dtype, 1)


class BlockLayout(NamedTuple):
    """The blocks of one cache group."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    scales: tuple[float, ...] = ()
    """Of float8_e4m3: the constants of each layer's keys and values."""

    @classmethod
    def of(cls, group: Paged, block_size: int) -> BlockLayout:
        """Return the layout of a cache group."""
        scales: tuple[float, ...] = ()
        if group.dtype == E4M3:
            scales = tuple(x for pair in group.layer_scales().values() for x in pair)
        return cls(
            len(group.layers), block_size, group.kv_heads, group.head_dim, group.dtype,
            scales,
        )  # fmt: skip

    def parts(self, count: int) -> dict[str, Part]:
        """Return the parts of ``count`` blocks."""
        shape = self.layers, 2, count, self.block_size, self.kv_heads, self.head_dim
        parts = {"cells": Part(self.dtype, shape)}
        if self.dtype == "int8":
            parts["scales"] = Part("float32", shape[:-1])
        elif self.dtype == E4M3:
            parts["scales"] = Part("float32", shape[:2])
        return parts

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(part.nbytes for part in self.parts(1).values())


class CacheLayout(NamedTuple):
    """Everything that a runner's cache holds of a sequence."""

    groups: tuple[BlockLayout, ...]
    slotted: tuple[Slotted, ...] = ()

    def parts(self, group: int, count: int) -> dict[str, Part]:
        """Return the parts of blocks of a group, or of a slot."""
        if group != SLOT_GROUP:
            return self.groups[group].parts(count)
        return {item.name: Part(item.dtype, item.shape) for item in self.slotted}

    def check(self, group: int, count: int, parts: Parts) -> None:
        """Raise :class:`~inl.errors.ProtocolError` for contents of another layout."""
        self.check_all(group, count, [parts])

    def check_all(self, group: int, count: int, each: Iterable[Parts]) -> None:
        """Raise as :meth:`check` for several contents, each of ``count`` blocks."""
        expected = self.parts(group, count)
        constants = () if group == SLOT_GROUP else self.groups[group].scales
        for parts in each:
            found = {name: Part(x.dtype, tuple(x.shape)) for name, x in parts.items()}
            if found != expected:
                raise ProtocolError(
                    f"contents of {_named(group)}: found {_listed(found)}, accepts "
                    f"{_listed(expected)}"
                )
            if constants:
                _check_scales(group, parts["scales"], constants)


def _check_scales(group: int, found: HostArray, constants: Sequence[float]) -> None:
    import numpy as np

    if not np.array_equal(found.data.reshape(-1), np.array(constants, np.float32)):
        raise ProtocolError(
            f"contents of {_named(group)}: found other constant scales than those "
            "of the cache; the other side has another checkpoint"
        )


def _named(group: int) -> str:
    return "a slot" if group == SLOT_GROUP else f"blocks of group {group}"


def _listed(parts: Mapping[str, Part]) -> str:
    texts = (f"{name} {part.dtype}{list(part.shape)}" for name, part in parts.items())
    return ", ".join(texts) or "nothing"


def stored_bits(array: HostArray) -> Bits:
    """Return the elements of an array as NumPy stores them, contiguous."""
    import numpy as np

    dtype = BITS.get(array.dtype, array.dtype)
    return np.ascontiguousarray(array.data).view(dtype).reshape(array.shape)


def copied(parts: Parts, empty: Empty | None = None) -> Parts:
    """Return contents in memory of their own; empty: allocates it."""
    import numpy as np

    results: dict[str, HostArray] = {}
    for name, part in parts.items():
        bits = stored_bits(part)
        data = (empty or np.empty)(bits.shape, bits.dtype.name)
        np.copyto(data, bits)
        results[name] = HostArray(data, part.dtype, part.shape)
    return results


def joined(
    parts: Sequence[Parts],
    axis: int,
    *,
    empty: Empty | None = None,
    each: Callable[..., Iterable[object]] = map,
) -> Parts:
    """Concatenate contents along :data:`HEADS` or :data:`BLOCKS`.

    Parts without the axis, which do not depend on it, are those of the first. empty:
    allocates the result. each: calls a function for several arguments, as ``map`` does.
    """
    import numpy as np

    result: dict[str, HostArray] = {}
    for name, first in parts[0].items():
        if len(parts) == 1 or len(first.shape) <= axis:
            result[name] = first
            continue
        pieces = [stored_bits(part[name]) for part in parts]
        shape, sizes = list(first.shape), [piece.shape[axis] for piece in pieces]
        shape[axis] = sum(sizes)
        data = (empty or np.empty)(tuple(shape), pieces[0].dtype.name)
        places = np.split(data, np.cumsum(sizes)[:-1], axis)
        list(each(np.copyto, places, pieces))
        result[name] = HostArray(data, first.dtype, data.shape)
    return result


def divided(parts: Parts, count: int, axis: int) -> list[Parts]:
    """Divide contents into ``count`` equal ones, the reverse of :func:`joined`."""
    import numpy as np

    results: list[dict[str, HostArray]] = [{} for _ in range(count)]
    for name, array in parts.items():
        pieces: Sequence[Bits] = [stored_bits(array)] * count
        if len(array.shape) > axis:
            pieces = np.split(pieces[0], count, axis)
        for result, piece in zip(results, pieces, strict=True):
            result[name] = HostArray(piece, array.dtype, piece.shape)
    return list(results)
