"""INL dynamics on torch tensors, with gradients that are written out.

The backward pass recomputes the velocities instead of keeping them, so that training
holds the operands only. Its equations stand in :mod:`inl.ops.inl_functions`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from inl.errors import RequestError
from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.functions import Functions
from inl_torch import eager
from inl_torch.eager.inl import coefficients, wide

Pair = tuple[torch.Tensor, torch.Tensor]
Operand = torch.Tensor | float

LAUNCHED = ("cuda",)
"""Kinds of devices that Triton's kernels run on."""


class Dynamics(torch.autograd.Function):
    """``n_steps`` steps with constant coefficients; each operand has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
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
        ctx.save_for_backward(x, v, mu, alpha, beta, gate, dt)
        ctx.n_steps, ctx.limit = n_steps, limit
        position, velocity = wide(x), wide(v).expand(x.shape)
        others = [wide(each) for each in (mu, alpha, beta, gate, dt)]
        for _ in range(n_steps):
            position, velocity, _ = _advance(position, velocity, *others, limit=limit)
        # What comes out may not be what came in, nor a view of it.
        return position.to(x.dtype, copy=True), velocity.to(v.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gx: torch.Tensor, gv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        x, v, mu, alpha, beta, gate, dt = (wide(each) for each in saved)
        gx, gv, limit = wide(gx), wide(gv), ctx.limit
        path = [(x, v.expand(x.shape))]
        for _ in range(ctx.n_steps - 1):
            path.append(_advance(*path[-1], mu, alpha, beta, gate, dt, limit=limit)[:2])
        zero = torch.zeros_like(x)
        d_mu, d_alpha, d_beta, d_gate, d_dt = zero, zero, zero, zero, zero
        for before, velocity in reversed(path[: ctx.n_steps]):
            _, new, free = _advance(
                before, velocity, mu, alpha, beta, gate, dt, limit=limit
            )
            s = torch.addcmul(gv, dt * gate, gx)
            if limit is not None:
                s = s * (free.abs() <= limit)
            moved = new * gx
            d_dt = d_dt + gate * moved
            d_gate = d_gate + dt * moved
            d_alpha = d_alpha + s * velocity
            d_beta = d_beta - s * (before - mu)
            d_mu = d_mu + beta * s
            gx, gv = gx - beta * s, alpha * s
        found = gx, gv, d_mu, d_alpha, d_beta, d_gate, d_dt
        return *map(_reduced, found, saved, ctx.needs_input_grad), None, None


# Torch does not say what its ``apply`` takes and gives.
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
    """Position and velocity of the next step, and the latter before its clamp."""
    free = alpha * v - beta * (x - mu)
    new = free if limit is None else free.clamp(-limit, limit)
    return x + dt * (gate * new), new, free


def _reduced(
    gradient: torch.Tensor, operand: torch.Tensor, needed: bool
) -> torch.Tensor | None:
    if not needed:
        return None
    # A CPU number may stand among tensors of another device.
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
    parts = tuple(_tensor(each, x) for each in (alpha, beta, gate))
    return _steps(x, v, mu, parts, dt, 1, None, None)


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
    parts: tuple[torch.Tensor, ...],
    dt: Operand,
    n_steps: int,
    most_beta: float | None,
    limit: float | None,
) -> Pair:
    """parts: alpha, beta and gate, or a controller's output."""
    tensors = _tensor(v, x), _tensor(mu, x)
    programs = _programs(x, n_steps)
    if programs is not None:
        given = (each.to(x.device) for each in (*tensors, *parts))
        options = programs.Options(n_steps, len(parts) == 1, most_beta, limit)
        step = dt.to(x.device) if isinstance(dt, torch.Tensor) else dt
        return _as_given(x, v, programs.dynamics(options, step, x, *given))
    if len(parts) == 1:
        parts = coefficients(parts[0], most_beta)
    found = _dynamics(x, *tensors, *parts, _tensor(dt, x), n_steps, limit)
    return _as_given(x, v, found)


def _programs(x: torch.Tensor, n_steps: int) -> Any:
    """The module that computes this in one launch each way, where there is one."""
    if x.device.type not in LAUNCHED or importlib.util.find_spec("triton") is None:
        return None
    from inl_torch.triton.dynamics import training as dynamics_training

    return dynamics_training if dynamics_training.takes(x, n_steps) else None


def inl_block(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, *, dt: Operand = 0.1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the op of that name, on [..., H], with gradients of every weight."""
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
    """A number as a tensor of no axes, computed with in the precision of ``like``."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=wide(like).dtype, device=like.device)


def _as_given(x: torch.Tensor, v: Operand, found: Pair) -> Pair:
    """A velocity that began as a number is stored as positions are."""
    moved, velocity = found
    return moved, velocity if isinstance(v, torch.Tensor) else velocity.to(x.dtype)


def _to_numpy(x: torch.Tensor) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        raise RequestError(
            "set_backend: found a tensor that needs a gradient, which is lost outside "
            'of torch; accepted: set_backend("auto"), x.detach(), or torch.no_grad()'
        )
    return wide(x.detach()).cpu().numpy()


def _from_numpy(array: Any, like: torch.Tensor | None) -> torch.Tensor:
    found = torch.from_numpy(np.array(array))
    return found if like is None else found.to(like.device, like.dtype)


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=_to_numpy,
    from_numpy=_from_numpy,
    kernels=eager.kernels,
)
"""What torch tensors are computed with."""
