"""INL dynamics: a damped second-order system with position, velocity, equilibrium.

One semi-implicit Euler step, for positions ``x`` and velocities ``v`` [..., D]::

    v' = alpha * v - beta * (x - mu)
    x' = x + dt * gate * v'

The thirds of a controller's output along the last axis are alpha, beta and gate before
their activations: sigmoid, softplus, sigmoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.errors import RequestError
from inl.ops import inl_cases as cases
from inl.ops.linear import Linear
from inl.spec.op import Spec, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

MOST_BETA, LIMIT = 2.0, 10.0
"""Clamps in :data:`inl_block`: maximum of beta and of the velocity's magnitude."""


class InlBlock(NamedTuple):
    """Parameters of :data:`inl_block`: equilibrium and two-layer controller."""

    mu: Array
    """[H]."""
    inner: Array
    """[K, 2 * H]: columns for the position, then for the velocity."""
    inner_bias: Array
    """[K]."""
    outer: Array
    """[3 * H, K]."""
    outer_bias: Array
    """[3 * H]."""
    context: Array | None = None
    """[H, H]: adds a linear function of the position to mu; ``None`` adds nothing."""


def sigmoid(x: Any) -> Any:
    """Compute ``1 / (1 + exp(-x))`` without loss of precision for negative x."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softplus(x: Any) -> Any:
    """Compute ``log(1 + exp(x))`` without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def check_operands(op_name: str, shape: tuple[int, ...], **operands: Any) -> None:
    """Raise :class:`RequestError` for an operand that does not broadcast to ``x``.

    shape: shape of ``x``. operands: arrays or specs by name.
    """
    for name, operand in operands.items():
        given = tuple(operand.shape)
        if given == shape:
            continue
        pairs = zip(reversed(given), reversed(shape), strict=False)
        if len(given) > len(shape) or any(a not in (1, b) for a, b in pairs):
            raise RequestError(
                f"{op_name}: {name}: found shape {list(given)}, accepted: one that "
                f"broadcasts to x {list(shape)}"
            )


def check_controller(op_name: str, shape: tuple[int, ...], controller: Any) -> None:
    """Raise :class:`RequestError` if a controller's output does not fit ``x``.

    shape: shape of ``x``. controller: [..., 3 * D], or [..., 3] for one value per row.
    """
    given = controller.shape
    # No divmod: sizes may be symbols of torch's compiler.
    thirds, rest = (given[-1] // 3, given[-1] % 3) if given else (0, 1)
    width = shape[-1] if shape else 1
    if rest or thirds not in (1, width):
        raise RequestError(
            f"{op_name}: controller: found shape {list(given)}, accepted: "
            f"[..., {3 * width}], as alpha, beta and gate of x {list(shape)}"
        )
    check_operands(op_name, shape, controller=Spec((*given[:-1], thirds), ""))


def _shapes(
    x: Spec, v: Spec, mu: Spec, alpha: Spec, beta: Spec, gate: Spec, **_: Any
) -> tuple[Spec, Spec]:
    operands = {"v": v, "mu": mu, "alpha": alpha, "beta": beta, "gate": gate}
    check_operands("inl_dynamics", x.shape, **operands)
    return Spec(x.shape, x.dtype), Spec(x.shape, v.dtype)


def _controlled_shapes(
    x: Spec, v: Spec, mu: Spec, controller: Spec, **_: Any
) -> tuple[Spec, Spec]:
    check_operands("inl_dynamics_step", x.shape, v=v, mu=mu)
    check_controller("inl_dynamics_step", x.shape, controller)
    return Spec(x.shape, x.dtype), Spec(x.shape, v.dtype)


@op(
    shapes=_shapes,
    cases=cases.dynamics_cases,
    flops=lambda x, *_, **__: 7 * elements(x),
    used_by="INL models and inl-toolkit",
)
def inl_dynamics(
    x: Array, v: Array, mu: Array, alpha: Array, beta: Array, gate: Array, *, dt: float
) -> tuple[Array, Array]:
    """One dynamics step: new position and velocity, pulled toward ``mu``.

    x: [..., D]; the other tensors broadcast to it. Half types are computed in float32.
    Returns the new position and velocity, both with the shape of ``x``.
    """
    v = alpha * v - beta * (x - mu)
    return x + dt * gate * v, v


def coefficients(controller: Any, most_beta: float | None) -> tuple[Any, Any, Any]:
    """Return alpha, beta and gate of a controller's output [..., 3 * D]."""
    alpha, beta, gate = np.split(controller, 3, axis=-1)
    beta = softplus(beta)
    if most_beta is not None:
        beta = np.minimum(beta, most_beta)
    return sigmoid(alpha), beta, sigmoid(gate)


@op(
    shapes=_controlled_shapes,
    cases=cases.step_cases,
    flops=lambda x, *_, **__: 20 * elements(x),
    used_by="INL models, Mamba-2 layers and inl-toolkit",
)
def inl_dynamics_step(
    x: Array,
    v: Array,
    mu: Array,
    controller: Array,
    *,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
) -> tuple[Array, Array]:
    """One dynamics step with a controller's output.

    controller: [..., 3 * D]. Its thirds are alpha, beta and gate before sigmoid,
    softplus and sigmoid. most_beta: maximum of beta. limit: maximum magnitude of the
    new velocity. ``None`` does not clamp. Returns the new position and velocity.
    """
    alpha, beta, gate = coefficients(controller, most_beta)
    v = alpha * v - beta * (x - mu)
    if limit is not None:
        v = np.clip(v, -limit, limit)
    return x + dt * gate * v, v


@op(
    shapes=_controlled_shapes,
    cases=cases.n_steps_cases,
    flops=lambda x, *_, n_steps, **__: (13 + 7 * n_steps) * elements(x),
    used_by="INL models and inl-toolkit",
)
def inl_dynamics_n_steps(
    x: Array,
    v: Array,
    mu: Array,
    controller: Array,
    *,
    n_steps: int,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
) -> tuple[Array, Array]:
    """Several dynamics steps with constant alpha, beta, gate and mu.

    Equals ``n_steps`` calls of :data:`inl_dynamics_step` without rounding in between.
    Returns the last position and velocity.
    """
    alpha, beta, gate = coefficients(controller, most_beta)
    v = np.broadcast_to(v, x.shape)
    for _ in range(n_steps):
        v = alpha * v - beta * (x - mu)
        if limit is not None:
            v = np.clip(v, -limit, limit)
        x = x + dt * gate * v
    return x, v


@op(
    shapes=lambda x: Spec(x.shape, x.dtype),
    cases=cases.silu_cases,
    flops=lambda x: 4 * elements(x),
)
def silu(x: Array) -> Array:
    """SiLU activation ``x * sigmoid(x)``, elementwise, in float32."""
    return x * sigmoid(x)


def _block_flops(h: Any, _velocity: Any, w: Any, **_: Any) -> int:
    matrices = [m for m in w if m is not None and len(m.shape) == 2]
    tokens = elements(h) // int(h.shape[-1])
    return 20 * elements(h) + 2 * tokens * sum(elements(m) for m in matrices)


# Rounding errors of three consecutive products are multiplied by the update.
@op(cases=cases.block_cases, weights=InlBlock, flops=_block_flops, tolerance=3.0)
def inl_block(
    ops: Ops, h: Array, velocity: Array, w: InlBlock, *, dt: float
) -> tuple[Array, Array, Array]:
    """One dynamics step with a learned controller and equilibrium.

    h, velocity: [T, H]. The controller is two linear layers over both, with a silu in
    between; mu is ``w.mu + h @ w.context.T``. beta is at most 2, the velocity's
    magnitude at most 10. Returns the new position, the new velocity and mu, all [T, H].
    """
    width = h.shape[-1]
    over_h = Linear(w.inner[:, :width], w.inner_bias)
    over_v = Linear(w.inner[:, width:])
    inner = ops.silu(ops.linear(h, over_h) + ops.linear(velocity, over_v))
    controller = ops.linear(inner, Linear(w.outer, w.outer_bias))
    mu = ops.zeros_like(h) + w.mu
    if w.context is not None:
        mu = mu + ops.linear(h, Linear(w.context))
    h, velocity = ops.inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu
