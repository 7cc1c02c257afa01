"""Abstract tensor with a shape and a dtype, without data.

It supports only the operations that a model may use. Models run on it in tests, to
check that; in tracing, to record the ops and their shapes; and in planning, to compute
costs before weights are loaded.
"""

from __future__ import annotations

import math
from typing import Any

from inl.spec.kernel import PLAIN


class StrictArray:
    """Supports ``+ - *``, ``shape``, ``dtype``, static slices and static reshapes.

    layout: of packed weights. stored_bytes: size of packed weights, if it is known;
    ``None`` too of a rank's shard of them that the loader decodes.
    Every other operation raises ``TypeError``.
    """

    __slots__ = ("dtype", "layout", "shape", "stored_bytes")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        *,
        layout: str = PLAIN,
        stored_bytes: int | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.layout = layout
        self.stored_bytes = stored_bytes

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def _combine(self, other: Any) -> StrictArray:
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return StrictArray(self.shape, self.dtype)
        if not isinstance(other, StrictArray):
            raise TypeError(f"{self!r} combined with {type(other).__name__}")
        if other.dtype != self.dtype:
            raise TypeError(f"dtypes differ: {self!r} and {other!r}")
        return StrictArray(_broadcast(self, other), self.dtype)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _combine

    def _in_place(self, _other: Any) -> StrictArray:
        raise TypeError("in-place operators are not supported; return new tensors")

    __iadd__ = __isub__ = __imul__ = _in_place

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy functions raise TypeError

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self!r}: models must not compare tensor data")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r}: has no data to convert to NumPy")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r}: models must not branch on tensor data")

    def __len__(self) -> int:
        raise TypeError(f"{self!r}: len() is not supported; use .shape")

    def __iter__(self) -> Any:
        raise TypeError(f"{self!r}: models must not iterate over a tensor")

    def reshape(self, *shape: int) -> StrictArray:
        """Return a tensor of another shape: static ints, one of which may be -1."""
        if not all(type(size) is int for size in shape):
            raise TypeError(f"reshape to {shape}: sizes must be static ints")
        known = math.prod(size for size in shape if size != -1)
        total = math.prod(self.shape)
        if shape.count(-1) > 1 or known == 0 or total % known:
            raise ValueError(f"{self!r} cannot be reshaped to {list(shape)}")
        result = tuple(total // known if size == -1 else size for size in shape)
        if math.prod(result) != total:
            raise ValueError(f"{self!r} cannot be reshaped to {list(shape)}")
        return StrictArray(result, self.dtype)

    def __getitem__(self, key: Any) -> StrictArray:
        keys = key if isinstance(key, tuple) else (key,)
        ellipses = [index for index, part in enumerate(keys) if part is Ellipsis]
        if ellipses:
            at = ellipses[0]
            fill = len(self.shape) - (len(keys) - 1)
            keys = (*keys[:at], *(slice(None),) * fill, *keys[at + 1 :])
        if len(keys) > len(self.shape):
            raise IndexError(f"{self!r}: found {len(keys)} indices, too many")
        shape: list[int] = []
        for part, size in zip(keys, self.shape, strict=False):
            shape += _sliced(self, part, size)
        return StrictArray((*shape, *self.shape[len(keys) :]), self.dtype)


def _sliced(array: StrictArray, part: Any, size: int) -> list[int]:
    if type(part) is int:
        if not -size <= part < size:
            raise IndexError(f"{array!r}: index {part} is out of range for size {size}")
        return []
    if isinstance(part, slice):
        ends = (part.start, part.stop, part.step)
        if all(end is None or type(end) is int for end in ends):
            return [len(range(*part.indices(size)))]
    raise TypeError(f"{array!r}[{part!r}]: only static ints and slices are supported")


def _broadcast(left: StrictArray, right: StrictArray) -> tuple[int, ...]:
    shape: list[int] = []
    for index in range(1, max(len(left.shape), len(right.shape)) + 1):
        sizes = {
            array.shape[-index] for array in (left, right) if index <= len(array.shape)
        } - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes do not broadcast: {left!r} and {right!r}")
        shape.append(sizes.pop() if sizes else 1)
    return tuple(reversed(shape))
