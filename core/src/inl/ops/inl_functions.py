"""INL functions on NumPy arrays, and their gradients as a reference.

With output gradients gx, gv and ``s = gv + dt * gate * gx``, the gradients of one step
are ::

    d_alpha = s * v       d_beta = -s * (x - mu)    d_gate = dt * v' * gx
    d_x = gx - beta * s   d_mu = beta * s           d_v = s * alpha
    d_dt = sum(gate * v' * gx)

each summed over the axes along which its operand was broadcast. s is 0 where the new
velocity is clamped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from inl.ops import inl
from inl.spec.explained import report
from inl.spec.functions import Functions, Pair


class Gradients(NamedTuple):
    """Gradients of :func:`inl_dynamics_backward`, each with its operand's shape."""

    x: Any
    v: Any
    mu: Any
    alpha: Any
    beta: Any
    gate: Any
    dt: Any


def wide(value: Any) -> Any:
    """Convert float16 to float32 for computation; other dtypes stay."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def inl_dynamics(x: Any, v: Any, *operands: Any, dt: Any) -> Pair:
    """Compute the op of the same name; float16 inputs are computed in float32."""
    report("dynamics/numpy", f"{np.asarray(x).dtype}, computed in float32 or wider")
    x_type, v_type = _types(x, v)
    position = wide(x)
    others = (np.asarray(wide(each), position.dtype) for each in (v, *operands))
    moved, new = inl.inl_dynamics.body(position, *others, dt=_number(dt))
    return moved.astype(x_type), np.asarray(new, v_type)


def inl_dynamics_step(
    x: Any, v: Any, mu: Any, controller: Any, *, dt: Any, **clamps: float | None
) -> Pair:
    """Compute the op of the same name; float16 inputs are computed in float32."""
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
    """Compute the op of the same name; float16 inputs are computed in float32."""
    report("dynamics/numpy", f"{np.asarray(x).dtype}, computed in float32 or wider")
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
    """Return the gradients of ``n_steps`` steps.

    gx, gv: [..., D], gradients of the last position and velocity. Computed in the dtype
    of the operands.
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
    gradients = (gx, gv, sums["mu"], sums["alpha"], sums["beta"], sums["gate"])
    pairs = zip(gradients, operands, strict=True)
    shaped = (_reduced(gradient, np.shape(each)) for gradient, each in pairs)
    return Gradients(*[*shaped, sums["dt"]])


def _advance(
    x: Any, v: Any, mu: Any, alpha: Any, beta: Any, gate: Any, dt: Any, limit: Any
) -> tuple[Any, Any, Any]:
    """Return the next position and velocity, and where the latter is not clamped."""
    new = alpha * v - beta * (x - mu)
    free = np.ones(np.shape(new), bool)
    if limit is not None:
        free = np.abs(new) <= limit
        new = np.clip(new, -limit, limit)
    return x + dt * gate * new, new, free


def _reduced(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over the axes along which its operand was broadcast."""
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
    """Return the dtypes of the new position and velocity."""
    return x.dtype, v.dtype if hasattr(v, "dtype") else x.dtype


def _number(dt: Any) -> float:
    return float(dt)


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=np.asarray,
    from_numpy=lambda array, like: np.asarray(array, getattr(like, "dtype", None)),
    arrays=np,
)
"""Functions on NumPy arrays."""
