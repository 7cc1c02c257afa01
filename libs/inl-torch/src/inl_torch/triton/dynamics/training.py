"""INL dynamics with gradients: one launch forward, one backward.

Only the operands are saved; the backward pass recomputes the state before each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inl_torch.triton.common import DTYPES, power
from inl_torch.triton.dynamics.dynamics import (
    BLOCK,
    Options,
    Pair,
    Shape3d,
    advance,
    broadcast_operands,
)
from inl_torch.triton.dynamics.kernels import backward

PROGRAMS = 1024
"""Most programs of the backward pass, each of which sums gradients over its rows."""

MAX_STEPS = 16
"""Most steps for which recomputing the states is cheaper than saving them."""

FULL, SUMMED = 1, 2
"""Kinds of gradients: with the shape of x, or a row summed over a program's rows."""

NAMES = ("X", "V", "MU", "ALPHA", "BETA", "GATE", "DT")


class Dynamics(torch.autograd.Function):
    """INL dynamics; coefficients are alpha, beta and gate, or a controller's output."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        dt: torch.Tensor | float,
        x: torch.Tensor,
        v: torch.Tensor,
        mu: torch.Tensor,
        *coefficients: torch.Tensor,
    ) -> Pair:
        number = dt if not isinstance(dt, torch.Tensor) else None
        saved_dt = () if number is not None else (dt,)
        ctx.save_for_backward(x, v, mu, *coefficients, *saved_dt)
        ctx.options, ctx.number = options, number
        return advance(x, (v, mu, *_split(coefficients)), dt, options)

    @staticmethod
    def backward(
        ctx: Any, gx: torch.Tensor, gv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, v, mu, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives
            return _differentiable(ctx, gx, gv)
        dt = ctx.number if ctx.number is not None else rest.pop()
        _, needs_dt, *needed = ctx.needs_input_grad
        if len(rest) == 1:
            needed = [*needed[:3], *3 * needed[3:]]
        results = gradients(
            gx,
            gv,
            x,
            (v, mu, *_split(tuple(rest))),
            dt,
            ctx.options,
            (*needed, needs_dt),
        )
        *others, d_dt = results
        if len(rest) == 1:
            others = [*others[:3], _join(others[3:], rest[0])]
        return None, d_dt, *others


def _differentiable(
    ctx: Any, gx: torch.Tensor, gv: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients as differentiable results, computed by eager kernels."""
    from inl_torch import functional

    # Views, so that one tensor given twice has a gradient in each place.
    held = [each.view_as(each) for each in ctx.saved_tensors]
    x, v, mu, *coefs = held if ctx.number is not None else held[:-1]
    dt = ctx.number if ctx.number is not None else held[-1]
    o = ctx.options
    with torch.enable_grad():
        results = functional.eager_steps(
            x, v, mu, tuple(coefs), dt, o.n_steps, o.most_beta, o.limit
        )
        wanted = [each for each in held if each.requires_grad]
        found = torch.autograd.grad(
            results, wanted, (gx, gv), create_graph=True, allow_unused=True
        )
    by_tensor = dict(zip(map(id, wanted), found, strict=True))
    parts = [by_tensor.get(id(each)) for each in held]
    d_dt = None if ctx.number is not None else parts.pop()
    return None, d_dt, *parts


dynamics: Callable[..., Pair] = Dynamics.apply
"""(options, dt, x, v, mu, and alpha, beta and gate or a controller's output)."""


def is_supported(x: torch.Tensor, n_steps: int) -> bool:
    """Whether the kernels support positions like ``x`` and ``n_steps`` steps."""
    has_kernel = str(x.dtype).removeprefix("torch.") in DTYPES
    return has_kernel and x.dim() > 0 and n_steps <= MAX_STEPS


def gradients(
    gx: torch.Tensor,
    gv: torch.Tensor,
    x: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    dt: torch.Tensor | float,
    options: Options,
    wanted: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Return the gradients of x, the operands and dt.

    wanted: which of these seven to compute; the others are ``None``.
    """
    x, shape3d = x.contiguous(), Shape3d.of(x.shape)
    tensors, strides = broadcast_operands(x, operands, dt, shape3d)
    each = (x, *operands, dt if isinstance(dt, torch.Tensor) else x)
    column_programs = -(-shape3d.width // BLOCK)
    rows_per_program = max(-(-shape3d.rows * column_programs // PROGRAMS), 1)
    parts = -(-shape3d.rows // rows_per_program)
    kinds = [
        _kind(operand, shape3d, name) * want
        for operand, want, name in zip(each, wanted, NAMES, strict=True)
    ]
    buffers, row_stride = _allocate_gradients(
        x, each, kinds, shape3d, parts, shared=options.activated
    )
    if shape3d.rows:
        block = min(power(shape3d.width), BLOCK)
        backward[(parts, column_programs)](
            gx.contiguous(), gv.contiguous(), x, *tensors,
            *(x if buffer is None else buffer for buffer in buffers), *strides,
            rows=shape3d.rows, size=shape3d.inner, width=shape3d.width,
            rows_per_program=rows_per_program, row_stride=row_stride,
            SCALAR_DT=not isinstance(dt, torch.Tensor), BLOCK=block, num_warps=8,
            **dict(zip(NAMES, kinds, strict=True)), **options.kernel_args(),
        )  # fmt: skip
    return [
        None if buffer is None else _sum_to_operand(buffer, operand, x.shape, kind)
        for buffer, operand, kind in zip(buffers, each, kinds, strict=True)
    ]


def _kind(operand: torch.Tensor, shape3d: Shape3d, name: str) -> int:
    summed = name in ("MU", "ALPHA", "BETA", "GATE") and shape3d.rows > 1
    row = operand.numel() == shape3d.width and operand.shape[-1:] == (shape3d.width,)
    return SUMMED if summed and row else FULL


def _allocate_gradients(
    x: torch.Tensor, each: tuple[torch.Tensor, ...], kinds: list[int], shape3d: Shape3d,
    parts: int, *, shared: bool,
) -> tuple[list[torch.Tensor | None], int]:  # fmt: skip
    """Allocate the gradients. shared: those of a controller are thirds of one
    tensor.
    """

    def buffer(index: int, width: int) -> torch.Tensor:
        operand, kind = each[index], kinds[index]
        is_full = kind == FULL and operand.shape == x.shape
        dtype = operand.dtype if is_full else torch.float32
        shape = (shape3d.rows if kind == FULL else parts, width)
        return torch.empty(shape, dtype=dtype, device=x.device)

    buffers = [
        buffer(index, shape3d.width)
        if kind and not (shared and index in (3, 4, 5))
        else None
        for index, kind in enumerate(kinds)
    ]
    if not shared or not kinds[3]:
        return buffers, shape3d.width
    buffers[3:6] = buffer(3, 3 * shape3d.width).chunk(3, -1)
    return buffers, 3 * shape3d.width


def _sum_to_operand(
    buffer: torch.Tensor, operand: torch.Tensor, shape: torch.Size, kind: int
) -> torch.Tensor:
    """Sum a gradient over the axes along which its operand was broadcast."""
    if kind == SUMMED:
        return buffer.sum(0).reshape(operand.shape).to(operand.dtype)
    return buffer.reshape(shape).sum_to_size(operand.shape).to(operand.dtype)


def _split(coefficients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if len(coefficients) == 1:
        return tuple(coefficients[0].chunk(3, -1))
    return coefficients


def _join(
    thirds: list[torch.Tensor | None], controller: torch.Tensor
) -> torch.Tensor | None:
    """Join a controller's gradient; no copy where its thirds are views of one
    tensor.
    """
    first = thirds[0]
    if first is None:
        return None
    base = first._base
    if base is not None and base.numel() == controller.numel():
        return base.view(controller.shape)
    return torch.cat([third for third in thirds if third is not None], -1)
