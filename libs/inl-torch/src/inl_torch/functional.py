"""INL dynamics on torch tensors, with an explicit backward pass.

The backward pass recomputes the velocities, so that training saves the operands only.
It is itself differentiable, and is traced by ``torch.compile`` and ``torch.func``.
Its equations are in :mod:`inl.ops.inl_functions`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from inl.errors import RequestError
from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.functions import Functions
from inl_torch import arrays, eager
from inl_torch.eager.inl import coefficients, upcast

Pair = tuple[torch.Tensor, torch.Tensor]
Operand = torch.Tensor | float

TRITON_DEVICES = ("cuda",)
"""Device types with Triton kernels."""


class Dynamics(torch.autograd.Function):
    """``n_steps`` steps with constant coefficients, differentiable in every operand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        v: torch.Tensor,
        mu: torch.Tensor,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        gate: torch.Tensor,
        dt: torch.Tensor,
        n_steps: int,
        limit: float | None,
    ) -> Pair:
        position, velocity = upcast(x), upcast(v).expand(x.shape)
        others = [upcast(each) for each in (mu, alpha, beta, gate, dt)]
        for _ in range(n_steps):
            position, velocity, _ = _advance(position, velocity, *others, limit=limit)
        # Outputs must not alias inputs.
        return position.to(x.dtype, copy=True), velocity.to(v.dtype, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:  # noqa: ARG004
        *operands, ctx.n_steps, ctx.limit = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(
        ctx: Any, gx: torch.Tensor, gv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        x, v, mu, alpha, beta, gate, dt = (upcast(each) for each in saved)
        gx, gv, limit = upcast(gx), upcast(gv), ctx.limit
        path = [(x, v.expand(x.shape))]
        for _ in range(ctx.n_steps - 1):
            path.append(_advance(*path[-1], mu, alpha, beta, gate, dt, limit=limit)[:2])
        zero = torch.zeros_like(x)
        d_mu, d_alpha, d_beta, d_gate, d_dt = zero, zero, zero, zero, zero
        for before, velocity in reversed(path[: ctx.n_steps]):
            _, new_v, unclamped = _advance(
                before, velocity, mu, alpha, beta, gate, dt, limit=limit
            )
            s = torch.addcmul(gv, dt * gate, gx)
            if limit is not None:
                s = s * (unclamped.abs() <= limit)
            displacement = new_v * gx
            d_dt = d_dt + gate * displacement
            d_gate = d_gate + dt * displacement
            d_alpha = d_alpha + s * velocity
            d_beta = d_beta - s * (before - mu)
            d_mu = d_mu + beta * s
            gx, gv = gx - beta * s, alpha * s
        gradients = gx, gv, d_mu, d_alpha, d_beta, d_gate, d_dt
        return *map(_sum_to_operand, gradients, saved, ctx.needs_input_grad), None, None


# ``apply`` is untyped.
_dynamics: Callable[..., Pair] = Dynamics.apply


def _advance(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    dt: torch.Tensor,
    *,
    limit: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the next position and velocity, and the velocity before clamping."""
    unclamped = alpha * v - beta * (x - mu)
    new_v = unclamped if limit is None else unclamped.clamp(-limit, limit)
    return x + dt * (gate * new_v), new_v, unclamped


def _sum_to_operand(
    gradient: torch.Tensor, operand: torch.Tensor, needed: bool
) -> torch.Tensor | None:
    if not needed:
        return None
    # The operand may be a CPU scalar.
    return gradient.sum_to_size(operand.shape).to(operand.device, operand.dtype)


def inl_dynamics(
    x: torch.Tensor,
    v: Operand,
    mu: Operand,
    alpha: Operand,
    beta: Operand,
    gate: Operand,
    *,
    dt: Operand = 0.1,
) -> Pair:
    """As :func:`inl.inl_dynamics`."""
    coefs = tuple(_tensor(each, x) for each in (alpha, beta, gate))
    return _steps(x, v, mu, coefs, dt, 1, None, None)


def inl_dynamics_step(
    x: torch.Tensor,
    v: Operand,
    mu: Operand,
    controller: torch.Tensor,
    *,
    dt: Operand = 0.1,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    """As :func:`inl.inl_dynamics_step`."""
    return inl_dynamics_n_steps(
        x, v, mu, controller, n_steps=1, dt=dt, most_beta=most_beta, limit=limit
    )


def inl_dynamics_n_steps(
    x: torch.Tensor,
    v: Operand,
    mu: Operand,
    controller: torch.Tensor,
    *,
    n_steps: int,
    dt: Operand = 0.1,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    """As :func:`inl.inl_dynamics_n_steps`."""
    return _steps(x, v, mu, (controller,), dt, n_steps, most_beta, limit)


def _steps(
    x: torch.Tensor,
    v: Operand,
    mu: Operand,
    coefs: tuple[torch.Tensor, ...],
    dt: Operand,
    n_steps: int,
    most_beta: float | None,
    limit: float | None,
) -> Pair:
    """coefs: alpha, beta and gate, or a controller's output."""
    tensors = _tensor(v, x), _tensor(mu, x)
    kernels = _triton_module(x, n_steps)
    if kernels is not None:
        operands = (each.to(x.device) for each in (*tensors, *coefs))
        options = kernels.Options(n_steps, len(coefs) == 1, most_beta, limit)
        step = dt.to(x.device) if isinstance(dt, torch.Tensor) else dt
        return _match_velocity_dtype(
            x, v, kernels.dynamics(options, step, x, *operands)
        )
    result = eager_steps(x, *tensors, coefs, dt, n_steps, most_beta, limit)
    return _match_velocity_dtype(x, v, result)


def eager_steps(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    coefs: tuple[torch.Tensor, ...],
    dt: Operand,
    n_steps: int,
    most_beta: float | None,
    limit: float | None,
) -> Pair:
    """Compute the steps by torch calls; differentiable any number of times."""
    if len(coefs) == 1:
        coefs = coefficients(coefs[0], most_beta)
    return _dynamics(x, v, mu, *coefs, _tensor(dt, x), n_steps, limit)


def _triton_module(x: torch.Tensor, n_steps: int) -> Any:
    """Return the module of one-launch Triton kernels, or ``None``."""
    if (
        x.device.type not in TRITON_DEVICES
        or importlib.util.find_spec("triton") is None
    ):
        return None
    from inl_torch.triton.dynamics import training as dynamics_training

    return dynamics_training if dynamics_training.is_supported(x, n_steps) else None


def inl_block(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, *, dt: Operand = 0.1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op ``inl_block`` on [..., H], differentiable in every weight."""
    inner = functional.linear(torch.cat([h, velocity], -1), w.inner, w.inner_bias)
    controller = functional.linear(functional.silu(inner), w.outer, w.outer_bias)
    mu = w.mu.expand_as(h)
    if w.context is not None:
        mu = mu + functional.linear(h, w.context)
    h, velocity = inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu


def _tensor(value: Operand, like: torch.Tensor) -> torch.Tensor:
    """Convert a number to a 0-d tensor of the precision and device of ``like``."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=upcast(like).dtype, device=like.device)


def _match_velocity_dtype(x: torch.Tensor, v: Operand, result: Pair) -> Pair:
    """Convert the velocity to the dtype of ``x`` where ``v`` was a number."""
    new_x, velocity = result
    return new_x, velocity if isinstance(v, torch.Tensor) else velocity.to(x.dtype)


def _to_numpy(x: torch.Tensor) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        raise RequestError(
            "set_backend: found a tensor that needs a gradient, which is lost outside "
            'of torch; accepted: set_backend("auto"), x.detach(), or torch.no_grad()'
        )
    return upcast(x.detach()).cpu().numpy()


def _from_numpy(array: Any, like: torch.Tensor | None) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor if like is None else tensor.to(like.device, like.dtype)


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=_to_numpy,
    from_numpy=_from_numpy,
    kernels=eager.kernels,
    arrays=arrays,
)
"""The functions of ``inl`` for torch tensors."""
