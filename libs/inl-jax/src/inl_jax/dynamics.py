"""Layer of INL dynamics as functions of its parameters."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from inl.errors import RequestError
from inl.ops.inl import InlBlock
from inl_jax.functional import Array, inl_block


def init_inl_dynamics(
    key: Any,
    hidden: int,
    *,
    controller: int = 64,
    context: bool = True,
    dtype: Any = jnp.float32,
) -> InlBlock:
    """Return random parameters for :func:`inl_dynamics_layer`, a pytree of arrays.

    key: of ``jax.random``. controller: width of the controller's inner layer. context:
    whether mu depends on the position. Matrices and biases are uniform within
    ``1 / sqrt(columns)``, as those of ``inl.nn.InlDynamics``; mu is 0. Raises
    :class:`~inl.errors.RequestError` for a size below 1.
    """
    for name, size in (("hidden", hidden), ("controller", controller)):
        if size < 1:
            raise RequestError(
                f"init_inl_dynamics: {name}: found {size}, accepted: 1 up"
            )
    keys = iter(jax.random.split(key, 5))

    def new(columns: int, *shape: int) -> Array:
        bound = 1 / math.sqrt(columns)
        return jax.random.uniform(next(keys), shape, dtype, -bound, bound)

    return InlBlock(
        mu=jnp.zeros(hidden, dtype),
        inner=new(2 * hidden, controller, 2 * hidden),
        inner_bias=new(2 * hidden, controller),
        outer=new(controller, 3 * hidden, controller),
        outer_bias=new(controller, 3 * hidden),
        context=new(hidden, hidden, hidden) if context else None,
    )


def inl_dynamics_layer(
    params: InlBlock, h: Array, velocity: Array | None = None, *, dt: Any = 0.1
) -> tuple[Array, Array, Array]:
    """Advance ``h`` and its velocity [..., hidden] by one step.

    Returns the new position, velocity (which begins at 0 by default) and mu, all
    [..., hidden]; computes the same as ``inl.nn.InlDynamics`` with equal parameters.
    """
    velocity = jnp.zeros_like(h) if velocity is None else velocity
    return inl_block(h, velocity, params, dt=dt)
