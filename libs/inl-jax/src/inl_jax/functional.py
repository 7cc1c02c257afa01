"""INL dynamics on JAX arrays, with an explicit backward pass.

As in torch, the backward pass recomputes the velocities; its equations are in
:mod:`inl.ops.inl_functions`. Steps are unrolled, so that XLA fuses them into one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.functions import Functions
from inl.spec.kernel import Kernel
from inl_jax.tensors import upcast

Array = jax.Array
Pair = tuple[Array, Array]
Operands = tuple[Array, Array, Array, Array, Array, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def dynamics(operands: Operands, n_steps: int, limit: float | None) -> Pair:
    """``n_steps`` steps with constant coefficients; the last operand is dt."""
    x, v, *others = map(upcast, operands)
    v = jnp.broadcast_to(v, x.shape)
    for _ in range(n_steps):
        x, v, _ = _advance(x, v, *others, limit=limit)
    return x.astype(operands[0].dtype), v.astype(operands[1].dtype)


def _forward(
    operands: Operands, n_steps: int, limit: float | None
) -> tuple[Pair, Operands]:
    return dynamics(operands, n_steps, limit), operands


def _backward(
    n_steps: int, limit: float | None, operands: Operands, incoming: Pair
) -> tuple[Operands]:
    gx, gv = map(upcast, incoming)
    x, v, mu, alpha, beta, gate, dt = map(upcast, operands)
    states = [(x, jnp.broadcast_to(v, x.shape))]
    for _ in range(n_steps - 1):
        states.append(_advance(*states[-1], mu, alpha, beta, gate, dt, limit=limit)[:2])
    d_mu = d_alpha = d_beta = d_gate = d_dt = jnp.zeros_like(x)
    for x, v in reversed(states[:n_steps]):
        _, new_v, unclamped = _advance(x, v, mu, alpha, beta, gate, dt, limit=limit)
        s = gv + dt * gate * gx
        if limit is not None:
            s = jnp.where(jnp.abs(unclamped) <= limit, s, 0)
        d_dt += gate * new_v * gx
        d_gate += dt * new_v * gx
        d_alpha += s * v
        d_beta -= s * (x - mu)
        d_mu += beta * s
        gx, gv = gx - beta * s, alpha * s
    gradients = gx, gv, d_mu, d_alpha, d_beta, d_gate, d_dt
    x, v, mu, alpha, beta, gate, dt = map(_sum_to_operand, gradients, operands)
    return ((x, v, mu, alpha, beta, gate, dt),)


dynamics.defvjp(_forward, _backward)


def _advance(
    x: Array,
    v: Array,
    mu: Array,
    alpha: Array,
    beta: Array,
    gate: Array,
    dt: Array,
    *,
    limit: float | None,
) -> tuple[Array, Array, Array]:
    """Return the next position and velocity, and the velocity before clamping."""
    unclamped = alpha * v - beta * (x - mu)
    new_v = unclamped if limit is None else jnp.clip(unclamped, -limit, limit)
    return x + dt * gate * new_v, new_v, unclamped


def _sum_to_operand(gradient: Array, operand: Array) -> Array:
    """Sum over the axes along which ``operand`` was broadcast."""
    extra = gradient.ndim - operand.ndim
    summed = jnp.sum(gradient, axis=tuple(range(extra)))
    pairs = enumerate(zip(operand.shape, summed.shape, strict=True))
    broadcast_axes = tuple(axis for axis, (size, full) in pairs if size == 1 != full)
    return jnp.sum(summed, axis=broadcast_axes, keepdims=True).astype(operand.dtype)


def coefficients(
    controller: Array, most_beta: float | None
) -> tuple[Array, Array, Array]:
    """Split and activate a controller's output [..., 3 * D]: alpha, beta and gate."""
    alpha, beta, gate = jnp.split(upcast(controller), 3, axis=-1)
    beta = jax.nn.softplus(beta)
    if most_beta is not None:
        beta = jnp.minimum(beta, most_beta)
    return jax.nn.sigmoid(alpha), beta, jax.nn.sigmoid(gate)


def inl_dynamics(
    x: Any, v: Any, mu: Any, alpha: Any, beta: Any, gate: Any, *, dt: Any = 0.1
) -> Pair:
    """As :func:`inl.inl_dynamics`."""
    result = dynamics(_arrays(x, v, mu, alpha, beta, gate, dt), 1, None)
    return _match_velocity_dtype(x, v, result)


def inl_dynamics_step(
    x: Any,
    v: Any,
    mu: Any,
    controller: Any,
    *,
    dt: Any = 0.1,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    """As :func:`inl.inl_dynamics_step`."""
    return inl_dynamics_n_steps(
        x, v, mu, controller, n_steps=1, dt=dt, most_beta=most_beta, limit=limit
    )


def inl_dynamics_n_steps(
    x: Any,
    v: Any,
    mu: Any,
    controller: Any,
    *,
    n_steps: int,
    dt: Any = 0.1,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    """As :func:`inl.inl_dynamics_n_steps`."""
    coefs = coefficients(controller, most_beta)
    result = dynamics(_arrays(x, v, mu, *coefs, dt), n_steps, limit)
    return _match_velocity_dtype(x, v, result)


def inl_block(
    h: Array, velocity: Array, w: InlBlock, *, dt: Any = 0.1
) -> tuple[Array, Array, Array]:
    """The op ``inl_block`` on [..., H], differentiable in every weight.

    Products of float32 have float32 precision on all devices, including those that use
    a lower precision by default.
    """
    both = jnp.concatenate([h, velocity], axis=-1)
    inner = jax.nn.silu(_product(both, w.inner) + w.inner_bias)
    controller = _product(inner, w.outer) + w.outer_bias
    mu = jnp.broadcast_to(w.mu, h.shape)
    if w.context is not None:
        mu = mu + _product(h, w.context)
    h, velocity = inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu


def _product(x: Array, weight: Array) -> Array:
    return jnp.einsum("...k,nk->...n", x, weight, precision=jax.lax.Precision.HIGHEST)


def _arrays(x: Any, *others: Any) -> Any:
    """Convert numbers to 0-d arrays of the precision of ``x``."""
    dtype = upcast(x).dtype
    arrays = (
        each if hasattr(each, "dtype") else jnp.asarray(each, dtype) for each in others
    )
    return (x, *arrays)


def _match_velocity_dtype(x: Any, v: Any, result: Pair) -> Pair:
    """Convert the velocity to the dtype of ``x`` where ``v`` was a number."""
    position, velocity = result
    return position, velocity if hasattr(v, "dtype") else velocity.astype(x.dtype)


def _kernels() -> Iterable[Kernel]:
    from inl_jax.xla import KERNELS, kernel, moe

    batched = kernel.kernel(moe.dense_expert_linear, "expert_linear")
    return (*(k for k in KERNELS if k.op != "expert_linear"), batched)


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=lambda x: np.asarray(upcast(x)),
    from_numpy=lambda array, like: jnp.asarray(array, getattr(like, "dtype", None)),
    kernels=_kernels,
    is_traced=lambda x: isinstance(x, jax.core.Tracer),
)
"""The functions of ``inl`` for JAX arrays."""
