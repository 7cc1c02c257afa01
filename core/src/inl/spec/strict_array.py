"""A tensor stricter than any real one: it has a shape and a dtype and no data.

Models are run on it in tests (what it allows is all that a model may do), for
tracing (which ops with which shapes) and for planning (costs before any byte).
"""

from __future__ import annotations

import math
from typing import Any

from inl.spec.kernel import PLAIN


class StrictArray:
    """Allows ``+ - *``, ``shape``, ``dtype``, static slices and static reshapes."""

    __slots__ = ("dtype", "layout", "shape")

    def __init__(
        self, shape: tuple[int, ...], dtype: str, *, layout: str = PLAIN
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.layout = layout

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
        raise TypeError("no in-place operators: state goes in and comes out")

    __iadd__ = __isub__ = __imul__ = _in_place

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy's functions do not apply

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self!r}: a model may not compare data")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r}: holds no data for NumPy")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r}: a model may not branch on data")

    def __len__(self) -> int:
        raise TypeError(f"{self!r}: use .shape")

    def __iter__(self) -> Any:
        raise TypeError(f"{self!r}: a model may not loop over a tensor")

    def reshape(self, *shape: int) -> StrictArray:
        """View with another shape of static ints; one may be -1."""
        if not all(type(size) is int for size in shape):
            raise TypeError(f"reshape to {shape}: sizes must be plain ints")
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
        dots = [place for place, part in enumerate(keys) if part is Ellipsis]
        if dots:
            at = dots[0]
            fill = len(self.shape) - (len(keys) - 1)
            keys = (*keys[:at], *(slice(None),) * fill, *keys[at + 1 :])
        if len(keys) > len(self.shape):
            raise IndexError(f"{self!r} has no {len(keys)} axes")
        shape: list[int] = []
        for part, size in zip(keys, self.shape, strict=False):
            shape += _sliced(self, part, size)
        return StrictArray((*shape, *self.shape[len(keys) :]), self.dtype)


def _sliced(array: StrictArray, part: Any, size: int) -> list[int]:
    if type(part) is int:
        if not -size <= part < size:
            raise IndexError(f"{array!r}: index {part} is outside {size}")
        return []
    if isinstance(part, slice):
        ends = (part.start, part.stop, part.step)
        if all(end is None or type(end) is int for end in ends):
            return [len(range(*part.indices(size)))]
    raise TypeError(f"{array!r}[{part!r}]: only static ints and slices")


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
