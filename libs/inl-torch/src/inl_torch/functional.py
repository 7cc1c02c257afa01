"""INL dynamics on torch tensors: registered ops, or plain calls for the compiler.

The derivative of the ops recomputes the velocities, so that training saves the operands
only; plain calls save intermediate tensors. Both are differentiable any number of
times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from inl.errors import RequestError
from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.explained import RECORDS, refuse, report
from inl.spec.functions import Functions
from inl_torch import arrays
from inl_torch.eager.inl import upcast
from inl_torch.registered import alike, attention, experts, formula, product
from inl_torch.registered.block_sparse import block_sparse
from inl_torch.registered.dynamics import dynamics, launch, triton_module
from inl_torch.registered.register import is_transformed

Pair = tuple[torch.Tensor, torch.Tensor]
Operand = torch.Tensor | float


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
    result = formula.one_step(x, v, mu, alpha, beta, gate, dt)
    if result is not None:
        if RECORDS:
            report("dynamics/torch, fused products", f"{x.dtype}"[6:])
        return result
    result = alike.one_step(x, v, mu, alpha, beta, gate, dt)
    if result is not None:
        if RECORDS:
            _report(x, 1, True)
        return result
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
    state, rest = (x, _tensor(v, x), _tensor(mu, x)), (n_steps, most_beta, limit)
    has_kernel = triton_module(x, n_steps) is not None
    if RECORDS:
        _report(x, n_steps, has_kernel and not is_transformed(*state, *coefs))
    if not has_kernel or is_transformed(*state, *coefs):
        # Without a Triton kernel plain calls are faster
        # (docs/decisions/documents-surface.md), and the compiler fuses them with their
        # neighbors, but no op.
        result = formula.steps(*state, list(coefs), dt, *rest)
    else:
        # A number stays on the host, where the op reads it.
        step = _tensor(dt, x, torch.device("cpu"))
        alpha, beta, gate = coefs if len(coefs) == 3 else (*coefs, None, None)
        # Through the op a small step takes several times as long as its kernel.
        given = (*state, *coefs, step)
        has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        call: Callable[..., Pair] = dynamics if has_gradient else launch
        result = call(*state, alpha, beta, gate, step, *rest)
    return _match_velocity_dtype(x, v, result)


def _report(x: torch.Tensor, n_steps: int, is_kernel: bool) -> None:
    dtype = f"{x.dtype}"[6:]
    wide = dtype if x.dtype == torch.float64 else "float32"
    precision = f"{dtype} operands, computed in {wide}"
    if is_kernel:
        report("dynamics/triton, one launch", precision)
        return
    why = f"{x.device.type}, {dtype}, {n_steps} steps, or a transform"
    refuse("dynamics/triton", f"computes on GPUs with Triton, found {why}")
    report("dynamics/torch", precision)


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


def _tensor(
    value: Operand, like: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """Convert a number to a 0-d tensor of the precision and device of ``like``."""
    if isinstance(value, torch.Tensor):
        return value
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full((), value, dtype=dtype, device=device or like.device)


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


_marked: set[int] = set()
"""Ids of functions that the compiler knows."""


def _mark_whole(functions: Sequence[Callable[..., Any]]) -> None:
    # Importing the compiler takes a second, and who uses it has imported it.
    if len(functions) == len(_marked) or "torch._dynamo" not in sys.modules:
        return
    mark: Callable[..., Any] = torch.compiler.allow_in_graph
    for each in functions:
        mark(each)
        _marked.add(id(each))


FUNCTIONS = Functions(
    inl_dynamics=inl_dynamics,
    inl_dynamics_step=inl_dynamics_step,
    inl_dynamics_n_steps=inl_dynamics_n_steps,
    to_numpy=_to_numpy,
    from_numpy=_from_numpy,
    kernels=lambda: experts.KERNELS,
    is_traced=is_transformed,
    arrays=arrays,
    block_sparse=block_sparse,
    product=product.product,
    attention=attention.attend,
    mark_whole=_mark_whole,
)
"""The functions of ``inl`` for torch tensors."""
