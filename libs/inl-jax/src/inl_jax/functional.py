"""INL dynamics on JAX arrays: plain calls, under every transformation of JAX.

Steps are unrolled, so that XLA fuses them, and their derivatives, into one pass. Wrap a
caller in ``jax.checkpoint`` to recompute the steps instead of storing velocities.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.explained import report
from inl.spec.functions import Functions
from inl.spec.kernel import Kernel
from inl_jax.tensors import upcast

Array = jax.Array
Pair = tuple[Array, Array]
Operands = tuple[Array, Array, Array, Array, Array, Array, Array]


def dynamics(operands: Operands, n_steps: int, limit: float | None) -> Pair:
    """``n_steps`` steps with constant coefficients; the last operand is dt."""
    report("dynamics/jax", f"{operands[0].dtype}, computed in float32 or wider")
    x, v, mu, alpha, beta, gate, dt = map(upcast, operands)
    v = jnp.broadcast_to(v, x.shape)
    for _ in range(n_steps):
        v = alpha * v - beta * (x - mu)
        if limit is not None:
            # The derivative of jnp.clip is 1/2 at the limit.
            v = jnp.where(jnp.abs(v) <= limit, v, limit * jnp.sign(v))
        x = x + dt * gate * v
    return x.astype(operands[0].dtype), v.astype(operands[1].dtype)


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
    inner = jax.nn.silu(_linear(both, w.inner) + w.inner_bias)
    controller = _linear(inner, w.outer) + w.outer_bias
    mu = jnp.broadcast_to(w.mu, h.shape)
    if w.context is not None:
        mu = mu + _linear(h, w.context)
    h, velocity = inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu


def _linear(x: Array, weight: Array) -> Array:
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


def _attention(*args: Any, **kwargs: Any) -> Array:
    from inl_jax.xla import tiled_attention

    return tiled_attention.attend(*args, **kwargs)


def _product(*args: Any) -> Array | None:
    from inl_jax.xla import rounded_product

    return rounded_product.product(*args)


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=lambda x: np.asarray(upcast(x)),
    from_numpy=lambda array, like: jnp.asarray(array, getattr(like, "dtype", None)),
    kernels=_kernels,
    is_traced=lambda x: isinstance(x, jax.core.Tracer),
    product=_product,
    attention=_attention,
)
"""The functions of ``inl`` for JAX arrays."""
