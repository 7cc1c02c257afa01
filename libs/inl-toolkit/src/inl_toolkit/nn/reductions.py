"""Reductions of tensors over one axis, several or all, with NumPy's arguments."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.elementwise import Elementwise

Axis = int | tuple[int, ...] | None


@translating_methods
class Reductions(Elementwise):
    """``axis`` is an axis, a tuple, or ``None`` for all; negative ones count back."""

    __slots__ = ()

    def sum(self, axis: Axis = None, *, keepdims: bool = False) -> Self:
        """Sum; of a bool tensor the number of true elements."""
        if self.dtype == "bool":
            return self.astype("int32").sum(axis, keepdims=keepdims)
        axes, whole = self._axes(axis)
        xp, shape = self.place.xp, self.shape

        def pull(g: Any) -> Any:
            return xp.broadcast_to(xp.reshape(g, whole), shape)

        if not axes:
            return self._result(self.array, [(self, pull)])
        found = xp.sum(self.array, axis=axes, keepdims=keepdims)
        # The sum of int32 is wider in some frameworks.
        return self._result(self.place.cast(found, self.dtype), [(self, pull)])

    def mean(self, axis: Axis = None, *, keepdims: bool = False) -> Self:
        """Average."""
        total = self.astype("float32").sum(axis, keepdims=keepdims)
        return total * (1 / self._count(axis) if self._count(axis) else math.nan)

    def var(
        self, axis: Axis = None, *, correction: int = 0, keepdims: bool = False
    ) -> Self:
        """Average squared distance from the mean; the divisor is n - ``correction``.

        The default is NumPy's, 0; that of torch is 1.
        """
        centered = self - self.mean(axis, keepdims=True)
        total = (centered * centered).sum(axis, keepdims=keepdims)
        count = self._count(axis) - correction
        return total * (1 / count if count > 0 else math.nan)

    def std(
        self, axis: Axis = None, *, correction: int = 0, keepdims: bool = False
    ) -> Self:
        """Square root of :meth:`var`."""
        return self.var(axis, correction=correction, keepdims=keepdims).sqrt()

    def max(self, axis: Axis = None, *, keepdims: bool = False) -> Self:
        """Largest element; equal ones share its gradient."""
        axes, whole = self._axes(axis)
        if not self._count(axis):
            raise RequestError(
                f"Tensor.max: found shape {list(self.shape)}, accepted: elements along "
                "the axis"
            )
        if not axes:
            return self.copy()
        xp, x = self.place.xp, self.array
        top = xp.max(x, axis=axes, keepdims=True)

        def pull(g: Any) -> Any:
            hot = self.place.cast(x == top, "float32")
            share = xp.reshape(g, whole) / xp.sum(hot, axis=axes, keepdims=True)
            return hot * share

        kept = [n for i, n in enumerate(self.shape) if keepdims or i not in axes]
        if keepdims:
            kept = list(whole)
        return self._result(xp.reshape(top, tuple(kept)), [(self, pull)])

    def min(self, axis: Axis = None, *, keepdims: bool = False) -> Self:
        """Smallest element; equal ones share its gradient."""
        least = -(-self).max(axis, keepdims=keepdims)
        return least.astype(self.dtype) if self.dtype == "bool" else least

    def argmax(self, axis: int | None = None) -> Self:
        """Index of the first of the largest elements, int32; computed on the host."""
        self._axes(axis)
        return self._from_host(np.argmax(self.numpy(), axis))

    def argmin(self, axis: int | None = None) -> Self:
        """Index of the first of the smallest elements, int32; computed on the host."""
        self._axes(axis)
        return self._from_host(np.argmin(self.numpy(), axis))

    def any(self, axis: Axis = None, *, keepdims: bool = False) -> Self:
        """Whether an element is not 0."""
        return self.astype("bool").sum(axis, keepdims=keepdims) > 0

    def all(self, axis: Axis = None, *, keepdims: bool = False) -> Self:
        """Whether no element is 0."""
        true = self.astype("bool").sum(axis, keepdims=keepdims)
        return true >= self._count(axis)

    def softmax(self, axis: int = -1) -> Self:
        """``exp(x) / exp(x).sum(axis)``, without overflow."""
        return self.log_softmax(axis).exp()

    def log_softmax(self, axis: int = -1) -> Self:
        """Logarithm of :meth:`softmax`."""
        # The subtracted maximum changes no derivative.
        shifted = self - self.detach().max(axis, keepdims=True)
        return shifted - shifted.exp().sum(axis, keepdims=True).log()

    def _from_host(self, index: Any) -> Self:
        return type(self)(index, self.device, dtype="int32")

    def _count(self, axis: Axis) -> int:
        return math.prod(self.shape[i] for i in self._axes(axis)[0])

    def _axes(self, axis: Axis) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axes counted from 0, and the shape in which their sizes are 1.

        Raises :class:`RequestError` for other axes than those of the tensor.
        """
        given = range(self.ndim) if axis is None else axis
        asked = (given,) if isinstance(given, int) else tuple(given)
        axes = tuple(i + self.ndim if i < 0 else i for i in asked)
        if len(set(axes)) < len(axes) or not all(0 <= i < self.ndim for i in axes):
            raise RequestError(
                f"Tensor: axis: found {axis!r:.80}, accepted: different axes of "
                f"{list(self.shape)}"
            )
        whole = tuple(1 if i in axes else n for i, n in enumerate(self.shape))
        return axes, whole
