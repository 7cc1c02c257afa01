"""The ops ``inl::dynamics`` and ``inl::dynamics_backward``.

Every operand broadcasts to ``x`` [..., D]. Without ``beta`` and ``gate``, ``alpha`` is
the output of a controller [..., 3 * D]. A ``dt`` of one element may be on the CPU: that
is read without synchronizing. Devices with Triton compute each op in one launch.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from typing import Any

import torch

from inl_torch.registered import formula, in_place
from inl_torch.registered.batching import in_front, rank_of
from inl_torch.registered.formula import Pair
from inl_torch.registered.register import register

TRITON_DEVICES = ("cuda",)
"""Device types with Triton kernels."""

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Looked up once: torch's compiler cannot trace the search."""


def launch(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor | None,
    gate: torch.Tensor | None,
    dt: torch.Tensor,
    n_steps: int,
    most_beta: float | None,
    limit: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op: the position and velocity after ``n_steps`` steps.

    most_beta: maximum of beta, of a controller's output only. limit: maximum magnitude
    of velocities. Both results have the shape of ``x``; the velocity has ``v``'s dtype.
    """
    coefs = formula.given(alpha, beta, gate)
    kernels = triton_module(x, n_steps)
    if kernels is not None:
        options = kernels.Options(n_steps, len(coefs) == 1, most_beta, limit)
        parts = _on(x.device, v, mu, *_parts(coefs))
        result: Pair = kernels.advance(x, parts, _scalar(dt, x), options)
        return result
    o = in_place.Operands.of(x, v, mu, coefs, dt, most_beta)
    position, velocity = deque(in_place.states(o, n_steps, limit), 1).pop()
    return _fresh(position, x, n_steps), _fresh(velocity, v, n_steps)


def _run_backward(
    gx: torch.Tensor,
    gv: torch.Tensor,
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor | None,
    gate: torch.Tensor | None,
    dt: torch.Tensor,
    n_steps: int,
    most_beta: float | None,
    limit: float | None,
    needed: list[bool],
) -> list[torch.Tensor]:
    """Return the gradients of the given operands from x to dt that are ``needed``."""
    coefs = formula.given(alpha, beta, gate)
    operands, shared = (x, v, mu, *coefs, dt), len(coefs) == 1
    wide = [*needed[:3], *3 * needed[3:4], needed[4]] if shared else needed
    found: list[Any]
    kernels = triton_module(x, n_steps)
    if kernels is not None:
        options = kernels.Options(n_steps, shared, most_beta, limit)
        parts = _on(x.device, v, mu, *_parts(coefs))
        found = kernels.gradients(gx, gv, x, parts, _scalar(dt, x), options, wide)
        if shared and needed[3]:
            found[3:6] = [kernels.join(found[3:6], alpha)]
    else:
        o = in_place.Operands.of(x, v, mu, coefs, dt, most_beta)
        found = [*in_place.gradients(gx, gv, o, n_steps, limit, wide)]
        if shared and needed[3]:
            rest = o, alpha, most_beta
            found[3:6] = [in_place.controller_gradient(found[3:6], *rest)]
    if shared and not needed[3]:
        found[3:6] = [None]
    return [
        _fresh(gradient.sum_to_size(operand.shape), operand, n_steps)
        for gradient, operand in zip(found, operands, strict=True)
        if gradient is not None
    ]


def _fresh(result: torch.Tensor, like: torch.Tensor, n_steps: int) -> torch.Tensor:
    """Convert a result to the dtype and device of an operand, contiguous.

    Without a step, a result may be an operand and is copied.
    """
    result = result.to(like.device, like.dtype, copy=not n_steps)
    return result.contiguous()


def _parts(coefs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return coefs[0].chunk(3, -1) if len(coefs) == 1 else tuple(coefs)


def _on(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(device) for each in tensors)


def _scalar(dt: torch.Tensor, x: torch.Tensor) -> torch.Tensor | float:
    on_host = dt.device.type == "cpu" and dt.numel() == 1
    return dt.item() if on_host else dt.to(x.device)


def triton_module(x: torch.Tensor, n_steps: int) -> Any:
    """Return the module of one-launch Triton kernels, or ``None``."""
    if x.device.type not in TRITON_DEVICES or not HAS_TRITON:
        return None
    from inl_torch.triton.dynamics import training

    return training if training.is_supported(x, n_steps) else None


def _fake(x: Any, v: Any, *_: Any) -> Any:
    return x.new_empty(x.shape), v.new_empty(x.shape, device=x.device)


def _fake_backward(_gx: Any, _gv: Any, *operands_and_attrs: Any) -> Any:
    *operands, _steps, _most_beta, _limit, needed = operands_and_attrs
    given = (each for each in operands if each is not None)
    chosen = zip(given, needed, strict=True)
    return [each.new_empty(each.shape) for each, wanted in chosen if wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    ctx.save_for_backward(*inputs[:7])
    ctx.attrs = inputs[7:]


def _gradients(ctx: Any, gx: torch.Tensor, gv: torch.Tensor) -> tuple[Any, ...]:
    operands = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:7]
    pairs = zip(wanted, operands, strict=True)
    needed = [want for want, each in pairs if each is not None]
    found = iter(dynamics_backward(gx, gv, *operands, *ctx.attrs, needed))
    return *(next(found) if want else None for want in wanted), None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    ctx.save_for_backward(*inputs[:9])
    *ctx.attrs, ctx.needed = inputs[9:]


def _second(ctx: Any, incoming: list[torch.Tensor]) -> tuple[Any, ...]:
    """Differentiate the derivative of :func:`formula.steps`."""
    saved = ctx.saved_tensors
    vjp: Any = torch.func.vjp

    def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
        def steps(*given: torch.Tensor) -> Pair:
            x, v, mu, *coefs, dt = given
            return formula.steps(x, v, mu, coefs, dt, *ctx.attrs)

        _, pull = vjp(steps, *tensors[2:])
        chosen = zip(pull(tensors[:2]), ctx.needed, strict=True)
        return [each for each, needed in chosen if needed]

    _, pull = vjp(gradients, *(each for each in saved if each is not None))
    found = iter(pull(list(incoming)))
    results = (None if each is None else next(found) for each in saved)
    return *results, None, None, None, None


def _batched(info: Any, dims: Any, *args: Any) -> Any:
    rank = rank_of(args[0], dims[0])
    operands = _all_in_front(args[:7], dims, info.batch_size, rank)
    return dynamics(*operands, *args[7:]), (0, 0)


def _batched_backward(info: Any, dims: Any, *args: Any) -> Any:
    rank, needed = rank_of(args[2], dims[2]), args[-1]
    tensors = _all_in_front(args[:9], dims, info.batch_size, rank)
    plain = _all_in_front(args[:9], dims, info.batch_size, None)[2:]
    shapes = [each.shape for each in plain if each is not None]
    found = dynamics_backward(*tensors, *args[9:])
    kept = [shape for shape, want in zip(shapes, needed, strict=True) if want]
    results = [each.reshape(shape) for each, shape in zip(found, kept, strict=True)]
    return results, [0] * len(results)


def _all_in_front(
    tensors: Any, dims: Any, size: int, rank: int | None
) -> list[torch.Tensor | None]:
    return [
        None if each is None else in_front(each, dim, size, rank)
        for each, dim in zip(tensors, dims, strict=False)
    ]


dynamics = register(
    "inl::dynamics",
    launch,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    batched=_batched,
)
"""(x, v, mu, alpha, beta, gate, dt, n_steps, most_beta, limit)."""

dynamics_backward = register(
    "inl::dynamics_backward",
    _run_backward,
    fake=_fake_backward,
    save=_save_backward,
    gradients=_second,
    batched=_batched_backward,
)
"""(gx, gv), then the arguments of :data:`dynamics`, and ``needed``."""
