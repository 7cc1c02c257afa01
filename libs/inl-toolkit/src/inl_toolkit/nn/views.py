"""Parts and other shapes of tensors: indexing, iteration, axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.base import TensorBase
from inl_toolkit.nn.gradients import scatter, unbroadcast
from inl_toolkit.nn.reductions import Reductions


@translating_methods
class Views(Reductions):
    """Indexing as NumPy's, and changes of shape."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Self:
        """Return the elements that an index selects; NumPy's rules hold.

        key: integers, slices, ``...``, ``None``, tensors or arrays of int32 or bool, or
        a tuple of them. The gradient of an element that is selected several times is
        the sum. Raises :class:`RequestError` for others, and for integers outside.
        """
        parts = tuple(map(_host_index, key if isinstance(key, tuple) else (key,)))
        place, xp, shape = self.place, self.place.xp, self.shape
        is_basic = all(map(_is_basic, parts))
        try:
            # Of an array without memory, for the check and the shape.
            found = np.broadcast_to(np.int8(0), shape)[parts].shape
        except (IndexError, ValueError) as error:
            raise RequestError(
                f"Tensor: index: found {key!r:.80} for shape {list(shape)}: {error}"
            ) from error

        def positions() -> Any:
            every = np.arange(self.size, dtype=np.int32).reshape(shape)
            return every[parts].reshape(-1)

        if is_basic:
            array = self.array[parts]

            def pull(g: Any) -> Any:
                return scatter(place, positions(), shape)(g)

        else:
            flat = positions()
            whole = xp.reshape(self.array, (self.size,))
            array = xp.reshape(xp.take(whole, place.array(flat), axis=0), found)

            def pull(g: Any) -> Any:
                return scatter(place, flat, shape)(g)

        return self._result(array, [(self, pull)])

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Self]:
        if not self.ndim:
            raise TypeError("iteration over a tensor without axes")
        return (self[index] for index in range(len(self)))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def reshape(self, *shape: Any) -> Self:
        """Return the same elements in another shape, whose sizes may be one tuple.

        One size may be -1. Raises :class:`RequestError` for another number of elements.
        """
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        xp, before = self.place.xp, self.shape
        known = math.prod(size for size in shape if size != -1)
        fits = known == self.size
        if -1 in shape:
            fits = shape.count(-1) == 1 and known > 0 and self.size % known == 0
        if not fits:
            raise RequestError(
                f"Tensor.reshape: found {list(shape)}, accepted: sizes with "
                f"{self.size} elements, as in {list(before)}"
            )
        edges = [(self, lambda g: xp.reshape(g, before))]
        return self._result(xp.reshape(self.array, shape), edges)

    view = reshape

    def flatten(self) -> Self:
        """Return the elements in one axis."""
        return self.reshape(self.size)

    def squeeze(self, axis: int | None = None) -> Self:
        """Remove an axis of size 1, or all of them."""
        axes = self._axes(axis)[0]
        if axis is None:
            axes = tuple(i for i in axes if self.shape[i] == 1)
        elif self.shape[axis] != 1:
            raise RequestError(
                f"Tensor.squeeze: axis: found {axis} of {list(self.shape)}, accepted: "
                "an axis of size 1"
            )
        return self.reshape([n for i, n in enumerate(self.shape) if i not in axes])

    def unsqueeze(self, axis: int) -> Self:
        """Insert an axis of size 1 before ``axis``; -1 is after the last."""
        at = axis + self.ndim + 1 if axis < 0 else axis
        if not 0 <= at <= self.ndim:
            raise RequestError(
                f"Tensor.unsqueeze: axis: found {axis}, accepted: {-self.ndim - 1} to "
                f"{self.ndim}"
            )
        return self.reshape([*self.shape[:at], 1, *self.shape[at:]])

    def broadcast_to(self, *shape: Any) -> Self:
        """Repeat along axes of size 1 and new ones; -1 keeps the size of an axis."""
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        offset = len(shape) - self.ndim
        wanted = tuple(
            self.shape[i - offset] if n == -1 and i >= offset >= 0 else n
            for i, n in enumerate(shape)
        )
        try:
            np.broadcast_to(np.broadcast_to(np.int8(0), self.shape), wanted)
        except ValueError as error:
            raise RequestError(
                f"Tensor.broadcast_to: found {list(shape)}, accepted: shapes to which "
                f"{list(self.shape)} broadcasts"
            ) from error
        spread = self.place.xp.broadcast_to(self.array, wanted)
        return self._result(spread, [(self, unbroadcast(self))])

    expand = broadcast_to

    def swapaxes(self, first: int, second: int) -> Self:
        """Exchange two axes."""
        (a,), (b,) = self._axes(first)[0], self._axes(second)[0]
        xp = self.place.xp
        edges = [(self, lambda g: xp.swapaxes(g, a, b))]
        return self._result(xp.swapaxes(self.array, a, b), edges)

    def permute(self, *axes: int) -> Self:
        """Order the axes as given, each once."""
        order = list(self._axes(axes)[0])
        if len(order) != self.ndim:
            raise RequestError(
                f"Tensor.permute: found {list(axes)}, accepted: all axes of "
                f"{list(self.shape)}"
            )
        turned, now = self, list(range(self.ndim))
        for at, axis in enumerate(order):
            where = now.index(axis)
            if where != at:
                turned = turned.swapaxes(at, where)
                now[at], now[where] = now[where], now[at]
        return turned

    @property
    def T(self) -> Self:  # noqa: N802 - NumPy's name
        """The tensor with its last two axes exchanged."""
        return self.swapaxes(-1, -2) if self.ndim > 1 else self


def _host_index(part: Any) -> Any:
    """Return a part of an index as NumPy takes it."""
    if isinstance(part, TensorBase):
        if part.dtype == "float32":
            raise RequestError(
                "Tensor: index: found a tensor of float32, accepted: int32 or bool"
            )
        return part.numpy()
    if isinstance(part, list):
        return np.asarray(part) if part else np.zeros(0, np.int64)
    return int(part) if isinstance(part, np.integer) else part


def _is_basic(part: Any) -> bool:
    """Whether the arrays of every framework take this part of an index."""
    if isinstance(part, slice):
        return part.step is None or part.step > 0
    return part is None or part is Ellipsis or type(part) is int
