"""INL dynamics as plain torch calls, which every transformation of torch supports."""

from __future__ import annotations

from typing import Any

import torch

from inl_torch.eager.inl import coefficients, upcast

Pair = tuple[torch.Tensor, torch.Tensor]


def given(*coefs: torch.Tensor | None) -> list[torch.Tensor]:
    """List alpha, beta and gate, or the output of a controller alone."""
    return [each for each in coefs if each is not None]


def activated(
    coefs: list[torch.Tensor], most_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return alpha, beta and gate in float32 or wider.

    coefs: these three, or one output of a controller [..., 3 * D].
    """
    if len(coefs) == 1:
        return coefficients(coefs[0], most_beta)
    alpha, beta, gate = map(upcast, coefs)
    return alpha, beta, gate


def steps(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    coefs: list[torch.Tensor],
    dt: torch.Tensor | float,
    n_steps: int,
    most_beta: float | None,
    limit: float | None,
) -> Pair:
    """Return the new position and velocity, of the dtypes of ``x`` and ``v``.

    coefs: as in :func:`activated`. Every operand broadcasts to ``x``.
    """
    if len(coefs) == 3:
        coefs = [_expanded(each, x) for each in coefs]
    alpha, beta, gate = activated(coefs, most_beta)
    position, velocity = upcast(x), upcast(_expanded(v, x))
    offset = _difference(x, mu)
    if _is_fused(dt, x, v, mu, alpha, beta, gate):
        # As below, in four passes over memory for one step instead of seven.
        for step in range(n_steps):
            offset = position - upcast(mu) if step else offset
            velocity = torch.addcmul(alpha * velocity, beta, offset, value=-1)
            if limit is not None:
                velocity = velocity.clamp(-limit, limit)
            position = torch.addcmul(position, gate, velocity, value=float(dt))
    else:
        slope = (upcast(dt) if isinstance(dt, torch.Tensor) else dt) * gate
        for step in range(n_steps):
            if step:
                offset = position - upcast(_expanded(mu, x))
            velocity = alpha * velocity - beta * offset
            if limit is not None:
                velocity = velocity.clamp(-limit, limit)
            position = position + slope * velocity
    if not n_steps:  # results must not alias operands
        position, velocity = position.clone(), velocity.expand(x.shape).clone()
    return position.to(x.dtype), velocity.to(v.dtype)


def one_step(
    x: Any, v: Any, mu: Any, alpha: Any, beta: Any, gate: Any, dt: Any
) -> Pair | None:
    """One of :func:`steps` without a limit, of tensors of one wide dtype on a CPU.

    ``None`` for other operands. What that function asks about them takes longer than a
    step of few rows.
    """
    if type(dt) is not float or torch.compiler.is_compiling():
        return None
    dtype, has_gradient = x.dtype, False
    if dtype.itemsize < 4:
        return None
    for each in (x, v, mu, alpha, beta, gate):
        if type(each) is not torch.Tensor or each.dtype != dtype or not each.is_cpu:
            return None
        has_gradient = has_gradient or each.requires_grad
    if has_gradient and torch.is_grad_enabled():
        velocity = alpha * v - beta * (x - mu)
        return x + (dt * gate) * velocity, velocity
    velocity = torch.addcmul(alpha * v, beta, x - mu, value=-1)
    return torch.addcmul(x, gate, velocity, value=dt), velocity


def _is_fused(dt: torch.Tensor | float, *operands: torch.Tensor) -> bool:
    """Whether fused products take less time: on a CPU, without derivatives.

    The compiler fuses the plain formula, whose derivatives have fewer terms.
    """
    if torch.compiler.is_compiling() or type(dt) is not float:
        return False
    has_gradient = torch.is_grad_enabled()
    return all(
        type(each) is torch.Tensor
        and each.device.type == "cpu"
        and not (has_gradient and each.requires_grad)
        for each in operands
    )


def _difference(x: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Return ``x - mu`` in float32 or wider.

    Of half types, both are converted for it alone, and ``mu`` is negated first: the
    gradients of both are then one tensor of the half type, which the compiler stores
    once. It would store the terms of ``mu``'s in float32, also where the graph rounds.
    """
    if mu.dtype.itemsize >= 4:
        return upcast(x) - upcast(mu)
    return upcast(x) + upcast((-mu).expand(x.shape))


def _expanded(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Broadcast an operand of a half type to ``x`` before it is widened.

    The terms of its gradient, [..., D], then have the half type before they are summed,
    in float32: the compiler stores them, and float32 would take twice the traffic.
    """
    return operand.expand(x.shape) if operand.dtype.itemsize < 4 else operand
