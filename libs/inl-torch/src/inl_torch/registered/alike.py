"""One step on tensors of one shape, dtype and GPU, without torch's dispatch of ops.

Through the op ``inl::dynamics`` a small step and its derivative take several times as
long as their kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from inl_torch.registered import dynamics
from inl_torch.registered.register import is_wrapped

Pair = tuple[torch.Tensor, torch.Tensor]
TYPES = (torch.Tensor, torch.nn.Parameter)


def one_step(
    x: Any, v: Any, mu: Any, alpha: Any, beta: Any, gate: Any, dt: Any
) -> Pair | None:
    """Return the new position and velocity, ``None`` for operands of other kinds."""
    if type(dt) is not float or torch.compiler.is_compiling():
        return None
    operands = x, v, mu, alpha, beta, gate
    if type(x) not in TYPES or not x.ndim or not x.numel():
        return None
    dtype, shape, device = x.dtype, x.shape, x.device
    has_gradient = False
    for each in operands:
        if type(each) not in TYPES or each.dtype != dtype or each.shape != shape:
            return None
        if each.device != device or not each.is_contiguous():
            return None
        has_gradient = has_gradient or each.requires_grad
    if dynamics.triton_module(x, 1) is None or is_wrapped(*operands):
        return None
    from inl_torch.triton.dynamics import alike

    if has_gradient and torch.is_grad_enabled():
        result: Pair = _Step.apply(*operands, dt)  # type: ignore[no-untyped-call]
        return result
    position, velocity = alike.advance(operands, dt)
    return position, velocity


class _Step(torch.autograd.Function):
    """Saves the operands only; its derivative, if differentiated, is that of the op."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        from inl_torch.triton.dynamics import alike

        *operands, ctx.dt = args
        ctx.save_for_backward(*operands)
        return alike.advance(operands, ctx.dt)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gx, gv = gradients
        operands, needed = ctx.saved_tensors, ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            step = torch.full((), ctx.dt, dtype=torch.float32)
            wanted = [*needed, False]
            every = (gx, gv, *operands, step, 1, None, None, wanted)
            computed = iter(dynamics.dynamics_backward(*every))
            return *(next(computed) if want else None for want in needed), None
        from inl_torch.triton.dynamics import alike

        return *alike.gradients(gx, gv, operands, ctx.dt, needed), None
