"""Loops on the device, over values that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def while_loop(
    condition: Callable[[Any], Any], body: Callable[[Any], Any], value: Any
) -> Any:
    """Repeat ``body`` while ``condition`` holds, with arrays in row-major order.

    XLA chooses the layout of a loop's arrays by the operations of its body, such as a
    scatter into a cache, and would copy them for kernels that need another one.
    """

    def constrained(value: Any) -> Any:
        return _row_major(body(_row_major(value)))

    return jax.lax.while_loop(condition, constrained, _row_major(value))


def _row_major(value: Any) -> Any:
    def constrain(x: Any) -> Any:
        if x.ndim < 2 or not x.size:
            return x
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return jax.tree.map(constrain, value)
