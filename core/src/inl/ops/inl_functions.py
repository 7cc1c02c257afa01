"""INL ops on NumPy arrays, and their gradients written out as the reference.

With incoming gradients gx, gv and ``s = gv + dt * gate * gx``, one step gives ::

    d_alpha = s * v       d_beta = -s * (x - mu)    d_gate = dt * v' * gx
    d_x = gx - beta * s   d_mu = beta * s           d_v = s * alpha
    d_dt = sum(gate * v' * gx)

each summed over the axes that its operand was broadcast along; s is 0 where a clamp
holds the new velocity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from inl.ops import inl
from inl.spec.functions import Functions, Pair


class Gradients(NamedTuple):
    """Of the operands of :func:`inl_dynamics_backward`, each of its shape."""

    x: Any
    v: Any
    mu: Any
    alpha: Any
    beta: Any
    gate: Any
    dt: Any


def wide(value: Any) -> Any:
    """Numbers as they are computed with: half types as float32."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def inl_dynamics(x: Any, v: Any, *operands: Any, dt: Any) -> Pair:
    """As the op of that name, in float32 for float16."""
    x_type, v_type = _types(x, v)
    position = wide(x)
    others = (np.asarray(wide(each), position.dtype) for each in (v, *operands))
    moved, new = inl.inl_dynamics.body(position, *others, dt=_number(dt))
    return moved.astype(x_type), np.asarray(new, v_type)


def inl_dynamics_step(
    x: Any, v: Any, mu: Any, controller: Any, *, dt: Any, **clamps: float | None
) -> Pair:
    """As the op of that name, in float32 for float16."""
    return inl_dynamics_n_steps(x, v, mu, controller, n_steps=1, dt=dt, **clamps)


def inl_dynamics_n_steps(
    x: Any,
    v: Any,
    mu: Any,
    controller: Any,
    *,
    n_steps: int,
    dt: Any,
    **clamps: float | None,
) -> Pair:
    """As the op of that name, in float32 for float16."""
    x_type, v_type = _types(x, v)
    position = wide(x)
    others = (np.asarray(wide(each), position.dtype) for each in (v, mu, controller))
    moved, new = inl.inl_dynamics_n_steps.body(
        position, *others, n_steps=n_steps, dt=_number(dt), **clamps
    )
    return np.array(moved, x_type), np.array(new, v_type)


def inl_dynamics_backward(
    gx: Any,
    gv: Any,
    x: Any,
    v: Any,
    mu: Any,
    alpha: Any,
    beta: Any,
    gate: Any,
    *,
    dt: float,
    n_steps: int = 1,
    limit: float | None = None,
) -> Gradients:
    """Gradients of a sum over the results of ``n_steps`` steps, weighted by gx and gv.

    gx, gv: [..., D], as the new position and velocity. Computed in the dtype given.
    """
    operands = (x, v, mu, alpha, beta, gate)
    path = [(x, np.broadcast_to(v, np.shape(x)))]
    for _ in range(n_steps - 1):
        path.append(_advance(*path[-1], mu, alpha, beta, gate, dt, limit)[:2])
    sums = dict.fromkeys(("mu", "alpha", "beta", "gate", "dt"), 0.0)
    for x, v in reversed(path[:n_steps]):
        _, new, free = _advance(x, v, mu, alpha, beta, gate, dt, limit)
        s = np.where(free, gv + dt * gate * gx, 0)
        sums["dt"] += np.sum(gate * new * gx)
        sums["gate"] += dt * new * gx
        sums["alpha"] += s * v
        sums["beta"] -= s * (x - mu)
        sums["mu"] += beta * s
        gx, gv = gx - beta * s, alpha * s
    found = (gx, gv, sums["mu"], sums["alpha"], sums["beta"], sums["gate"])
    shaped = (_reduced(g, np.shape(o)) for g, o in zip(found, operands, strict=True))
    return Gradients(*[*shaped, sums["dt"]])


def _advance(
    x: Any, v: Any, mu: Any, alpha: Any, beta: Any, gate: Any, dt: Any, limit: Any
) -> tuple[Any, Any, Any]:
    """Position and velocity of the next step, and where no clamp holds the latter."""
    new = alpha * v - beta * (x - mu)
    free = np.ones(np.shape(new), bool)
    if limit is not None:
        free = np.abs(new) <= limit
        new = np.clip(new, -limit, limit)
    return x + dt * gate * new, new, free


def _reduced(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes along which an operand of ``shape`` was broadcast."""
    if np.ndim(gradient) < len(shape):
        return np.broadcast_to(gradient, shape)
    extra = np.ndim(gradient) - len(shape)
    summed = np.sum(gradient, axis=tuple(range(extra)))
    ones = tuple(
        axis
        for axis, size in enumerate(shape)
        if size == 1 and np.shape(summed)[axis] > 1
    )
    return np.sum(summed, axis=ones, keepdims=True)


def _types(x: Any, v: Any) -> tuple[Any, Any]:
    """Dtypes of the results."""
    return x.dtype, v.dtype if hasattr(v, "dtype") else x.dtype


def _number(dt: Any) -> float:
    return float(dt)


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=np.asarray,
    from_numpy=lambda array, like: np.asarray(array, getattr(like, "dtype", None)),
)
"""What NumPy arrays are computed with."""
