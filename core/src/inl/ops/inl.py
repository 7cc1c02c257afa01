"""INL dynamics: a position drawn to an equilibrium, with a velocity it keeps.

One step, for positions ``x`` and velocities ``v`` [..., D]::

    v' = alpha * v - beta * (x - mu)
    x' = x + dt * gate * v'            the new velocity: semi-implicit Euler

A controller's output holds alpha, beta and gate before their activations, as thirds of
its last axis: sigmoid, softplus, sigmoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.errors import RequestError
from inl.ops import inl_cases as cases
from inl.ops.linear import Linear
from inl.spec.kernel import PLAIN
from inl.spec.op import Spec, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

MOST_BETA, LIMIT = 2.0, 10.0
"""Clamps of a model's layer: beta at most, and the size of its velocities."""


class InlBlock(NamedTuple):
    """Parameters of :data:`inl_block`: an equilibrium and a two-layer controller."""

    mu: Array
    """[H]."""
    inner: Array
    """[K, 2 * H], over positions, then velocities."""
    inner_bias: Array
    """[K]."""
    outer: Array
    """[3 * H, K]."""
    outer_bias: Array
    """[3 * H]."""
    context: Array | None = None
    """[H, H]: how mu moves with the position; without it, mu stays."""

    @property
    def layout(self) -> str:
        """Unpacked."""
        return PLAIN


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, which keeps its digits far below 0."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softplus(x: Any) -> Any:
    """``log(1 + exp(x))`` without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def check_operands(op_name: str, shape: tuple[int, ...], **operands: Any) -> None:
    """Raise :class:`RequestError` for an operand that does not broadcast to ``x``.

    shape: that of x. Each operand has a ``shape`` of its own.
    """
    for name, operand in operands.items():
        found = tuple(operand.shape)
        pairs = zip(reversed(found), reversed(shape), strict=False)
        if len(found) > len(shape) or any(a not in (1, b) for a, b in pairs):
            raise RequestError(
                f"{op_name}: {name}: found shape {list(found)}, accepted: one that "
                f"broadcasts to x {list(shape)}"
            )


def check_controller(op_name: str, shape: tuple[int, ...], found: Any) -> None:
    """Raise :class:`RequestError` where a controller's output is not three of ``x``."""
    thirds, rest = (divmod(found.shape[-1], 3)) if found.shape else (0, 1)
    width = shape[-1] if shape else 1
    if rest or thirds not in (1, width):
        raise RequestError(
            f"{op_name}: controller: found shape {list(found.shape)}, accepted: "
            f"[..., {3 * width}], as alpha, beta and gate of x {list(shape)}"
        )
    check_operands(op_name, shape, controller=Spec((*found.shape[:-1], thirds), ""))


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


def _size(x: Any) -> int:
    return int(np.prod(x.shape))


@op(
    shapes=_shapes,
    cases=cases.dynamics_cases,
    flops=lambda x, *_, **__: 7 * _size(x),
)
def inl_dynamics(
    x: Array, v: Array, mu: Array, alpha: Array, beta: Array, gate: Array, *, dt: float
) -> tuple[Array, Array]:
    """Advance position ``x`` and velocity ``v`` by one step toward ``mu``.

    x: [..., D]; every other tensor broadcasts to it. In float32 for half types.
    Returns the new position and velocity, both of the shape of ``x``.
    """
    v = alpha * v - beta * (x - mu)
    return x + dt * gate * v, v


def coefficients(controller: Any, most_beta: float | None) -> tuple[Any, Any, Any]:
    """Alpha, beta and gate of a controller's output [..., 3 * D]: three of [..., D]."""
    alpha, beta, gate = np.split(controller, 3, axis=-1)
    beta = softplus(beta)
    if most_beta is not None:
        beta = np.minimum(beta, most_beta)
    return sigmoid(alpha), beta, sigmoid(gate)


@op(
    shapes=_controlled_shapes,
    cases=cases.step_cases,
    flops=lambda x, *_, **__: 20 * _size(x),
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
    """Advance by one step with a ``controller``'s output [..., 3 * D].

    alpha, beta and gate are its thirds behind sigmoid, softplus (at most ``most_beta``)
    and sigmoid. The new velocity is kept within ``limit`` of 0, where that is given.
    """
    alpha, beta, gate = coefficients(controller, most_beta)
    v = alpha * v - beta * (x - mu)
    if limit is not None:
        v = np.clip(v, -limit, limit)
    return x + dt * gate * v, v


@op(
    shapes=_controlled_shapes,
    cases=cases.n_steps_cases,
    flops=lambda x, *_, n_steps, **__: (13 + 7 * n_steps) * _size(x),
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
    """Advance by ``n_steps`` steps with the same alpha, beta, gate and mu.

    As :data:`inl_dynamics_step` done so often; nothing is rounded between the steps.
    """
    alpha, beta, gate = coefficients(controller, most_beta)
    v = np.broadcast_to(v, x.shape)
    for _ in range(n_steps):
        v = alpha * v - beta * (x - mu)
        if limit is not None:
            v = np.clip(v, -limit, limit)
        x = x + dt * gate * v
    return x, v


@op(shapes=lambda x: Spec(x.shape, x.dtype), cases=cases.silu_cases)
def silu(x: Array) -> Array:
    """``x * sigmoid(x)``, elementwise, in float32."""
    return x * sigmoid(x)


def _block_flops(h: Any, _velocity: Any, w: Any, **_: Any) -> int:
    matrices = [m for m in w if m is not None and len(m.shape) == 2]
    tokens = _size(h) // int(h.shape[-1])
    return 20 * _size(h) + 2 * tokens * sum(_size(m) for m in matrices)


# Three products in a row, and an update that their rounding is multiplied in.
@op(cases=cases.block_cases, weights=InlBlock, flops=_block_flops, tolerance=3.0)
def inl_block(
    ops: Ops, h: Array, velocity: Array, w: InlBlock, *, dt: float
) -> tuple[Array, Array, Array]:
    """Advance ``h`` and ``velocity`` [T, H] by one step of a layer's own dynamics.

    The controller is two linear layers over both, with a silu between them; mu moves
    with the position. beta is at most 2 and velocities stay within 10. Returns the
    new position, the new velocity, and mu as it was there: three of [T, H].
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
