"""Arithmetic, functions and comparisons of tensors, element by element."""

from __future__ import annotations

import math
from typing import Any, Self

from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.base import Number, TensorBase
from inl_toolkit.nn.gradients import unbroadcast


@translating_methods
class Elementwise(TensorBase):
    """Operators and functions whose operands broadcast as NumPy's do."""

    __slots__ = ()

    def __add__(self, other: Any) -> Self:
        a, b = self._operands(other)
        return self._wide(
            a, a.array + b.array, (a, unbroadcast(a)), (b, unbroadcast(b))
        )

    def __mul__(self, other: Any) -> Self:
        first, second = self._operands(other)
        mine, theirs = unbroadcast(first), unbroadcast(second)
        a, b = first.array, second.array
        return self._wide(
            first,
            a * b,
            (first, lambda g: mine(g * b)),
            (second, lambda g: theirs(g * a)),
        )

    def __pow__(self, exponent: Any) -> Self:
        if isinstance(exponent, TensorBase):
            raise RequestError(
                "Tensor ** exponent: found a tensor, accepted: a number; for tensors "
                "write (x.log() * y).exp()"
            )
        is_whole = isinstance(exponent, int) and exponent >= 0
        base = self if is_whole and self.dtype == "int32" else self.astype("float32")
        x, xp = base.array, self.place.xp

        def pull(g: Any) -> Any:
            return (
                g * (exponent * x ** (exponent - 1)) if exponent else xp.zeros_like(g)
            )

        return self._wide(base, x**exponent, (base, pull))

    def __neg__(self) -> Self:
        return self * -1

    def __sub__(self, other: Any) -> Self:
        return self + (-self._tensor(other))

    def __rsub__(self, other: Any) -> Self:
        found: Self = -self + other
        return found

    def __truediv__(self, other: Any) -> Self:
        a, b = self._operands(other)
        inverse: Self = b**-1
        return a * inverse

    def __rtruediv__(self, other: Any) -> Self:
        inverse: Self = self**-1
        found: Self = inverse * other
        return found

    def __rpow__(self, base: Number) -> Self:
        return (self * math.log(base)).exp()

    __radd__ = __add__
    __rmul__ = __mul__

    def exp(self) -> Self:
        """Exponential."""
        x = self.astype("float32")
        y = self.place.xp.exp(x.array)
        return x._result(y, [(x, lambda g: g * y)])

    def log(self) -> Self:
        """Natural logarithm."""
        x = self.astype("float32")
        y = self.place.xp.log(x.array)
        return x._result(y, [(x, lambda g: g / x.array)])

    def sqrt(self) -> Self:
        """Square root."""
        x = self.astype("float32")
        y = self.place.xp.sqrt(x.array)
        return x._result(y, [(x, lambda g: g / (y + y))])

    def tanh(self) -> Self:
        """Hyperbolic tangent."""
        x = self.astype("float32")
        y = self.place.xp.tanh(x.array)
        return x._result(y, [(x, lambda g: g * (1 - y * y))])

    def sigmoid(self) -> Self:
        """``1 / (1 + exp(-x))``, without overflow."""
        return ((self * 0.5).tanh() + 1) * 0.5

    def relu(self) -> Self:
        """``max(x, 0)``."""
        xp, x = self.place.xp, self.array

        def pull(g: Any) -> Any:
            return xp.where(x > 0, g, xp.zeros_like(g))

        return self._result(xp.maximum(x, 0), [(self, pull)])

    def abs(self) -> Self:
        """Absolute value; the gradient at 0 is 0."""
        xp, x = self.place.xp, self.array

        def pull(g: Any) -> Any:
            return xp.where(x < 0, -g, xp.where(x > 0, g, xp.zeros_like(g)))

        return self._result(xp.abs(x), [(self, pull)])

    __abs__ = abs  # noqa: A003 - NumPy's name

    def clip(self, low: Number | None = None, high: Number | None = None) -> Self:
        """Limit to ``low`` and ``high``; the gradient of what is limited is 0."""
        limited = self if low is None else self.maximum(low)
        return limited if high is None else limited.minimum(high)

    clamp = clip

    def maximum(self, other: Any) -> Self:
        """Return the larger of each pair; the gradient of equal ones is this one's."""
        return self._select(self < other, other)

    def minimum(self, other: Any) -> Self:
        """Return the smaller of each pair; the gradient of equal ones is this one's."""
        return self._select(self > other, other)

    def __lt__(self, other: Any) -> Self:
        a, b = self._operands(other)
        return self._result(a.array < b.array, (), "bool")

    def __le__(self, other: Any) -> Self:
        a, b = self._operands(other)
        return self._result(a.array <= b.array, (), "bool")

    def __gt__(self, other: Any) -> Self:
        a, b = self._operands(other)
        return self._result(a.array > b.array, (), "bool")

    def __ge__(self, other: Any) -> Self:
        a, b = self._operands(other)
        return self._result(a.array >= b.array, (), "bool")

    def __eq__(self, other: object) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        a, b = self._operands(other)
        return self._result(a.array == b.array, (), "bool")

    def __ne__(self, other: object) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        a, b = self._operands(other)
        return self._result(a.array != b.array, (), "bool")

    __hash__ = object.__hash__
    """A key is one tensor, not its elements."""

    def __and__(self, other: Any) -> Self:
        a, b = self._masks(other, "&")
        return (a * b).astype("bool")

    def __or__(self, other: Any) -> Self:
        a, b = self._masks(other, "|")
        return (a + b).astype("bool")

    def __invert__(self) -> Self:
        mask, _ = self._masks(self, "~")
        return mask < 1

    def _masks(self, other: Any, sign: str) -> tuple[Self, Self]:
        """Return two bool tensors; raises :class:`RequestError` for others."""
        found = [each.dtype if isinstance(each, TensorBase) else type(each).__name__
                 for each in (self, other)]  # fmt: skip
        if set(found) - {"bool"}:
            raise RequestError(
                f"Tensor {sign}: found {' and '.join(found)}, accepted: bool, such as "
                "the result of a comparison"
            )
        return self._operands(other)

    def _select(self, condition: Self, other: Any) -> Self:
        """Return ``other`` where ``condition`` is true, and this tensor elsewhere."""
        first, second = self._operands(other)
        xp, mask = self.place.xp, condition.array
        mine, theirs = unbroadcast(first), unbroadcast(second)
        return self._wide(
            first,
            xp.where(mask, second.array, first.array),
            (first, lambda g: mine(xp.where(mask, xp.zeros_like(g), g))),
            (second, lambda g: theirs(xp.where(mask, g, xp.zeros_like(g)))),
        )

    def _wide(self, like: Self, array: Any, *edges: Any) -> Self:
        """Return a result in the dtype of a converted operand."""
        return self._result(array, edges, like.dtype)
