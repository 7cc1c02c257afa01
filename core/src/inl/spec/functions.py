"""Functions on users' own arrays: what one framework brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from inl.spec.kernel import Kernel

Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Functions:
    """INL ops on one framework's arrays, with gradients where it has them.

    Operands were checked: ``x`` is an array of the framework, each other one too or a
    number. Half types are computed in float32; the new position has the dtype of ``x``,
    the new velocity that of ``v`` (of ``x`` where it is a number).
    """

    inl_dynamics: Callable[..., Pair]
    """(x, v, mu, alpha, beta, gate, *, dt)."""
    inl_dynamics_step: Callable[..., Pair]
    """(x, v, mu, controller, *, dt, most_beta, limit)."""
    inl_dynamics_n_steps: Callable[..., Pair]
    """(x, v, mu, controller, *, n_steps, dt, most_beta, limit)."""
    to_numpy: Callable[[Any], Any]
    """An array on the host; raises RequestError where a gradient would be lost."""
    from_numpy: Callable[[Any, Any], Any]
    """(host array, an array whose dtype and place the result shall have). ``None`` for
    the latter is the host array's dtype on the framework's default device."""
    kernels: Callable[[], Iterable[Kernel]] | None = None
    """Lists kernels of other ops on such arrays; ``None``: those run on the host."""
