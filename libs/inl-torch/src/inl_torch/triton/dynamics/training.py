"""INL dynamics with gradients: one launch forward, one backward.

What came before each step is computed again from the operands, which are all that is
kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from inl_torch.triton.common import DTYPES, power
from inl_torch.triton.dynamics.dynamics import (
    BLOCK,
    Laid,
    Options,
    Pair,
    advance,
    placed,
)
from inl_torch.triton.dynamics.kernels import backward

PROGRAMS = 1024
"""Most programs backward, each of which sums what is a row over rows of its own."""

MOST_STEPS = 16
"""Steps up to which computing what came before each costs less than keeping it."""

WHOLE, SUMMED = 1, 2
"""Gradients as large as x, and rows summed over a program's rows."""

NAMES = ("X", "V", "MU", "ALPHA", "BETA", "GATE", "DT")


class Dynamics(torch.autograd.Function):
    """Some steps; coefficients are alpha, beta and gate, or a controller's output."""

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
        held = () if number is not None else (dt,)
        ctx.save_for_backward(x, v, mu, *coefficients, *held)
        ctx.options, ctx.number = options, number
        return advance(x, (v, mu, *_split(coefficients)), dt, options)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gx: torch.Tensor, gv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, v, mu, *rest = ctx.saved_tensors
        dt = ctx.number if ctx.number is not None else rest.pop()
        _, needs_dt, *needed = ctx.needs_input_grad
        if len(rest) == 1:
            needed = [*needed[:3], *3 * needed[3:]]
        found = gradients(
            gx,
            gv,
            x,
            (v, mu, *_split(tuple(rest))),
            dt,
            ctx.options,
            (*needed, needs_dt),
        )
        *others, d_dt = found
        if len(rest) == 1:
            others = [*others[:3], _joined(others[3:], rest[0])]
        return None, d_dt, *others


dynamics: Callable[..., Pair] = Dynamics.apply
"""(options, dt, x, v, mu, and alpha, beta and gate or a controller's output)."""


def takes(x: torch.Tensor, n_steps: int) -> bool:
    """Whether these programs compute positions like ``x`` for so many steps."""
    known = str(x.dtype).removeprefix("torch.") in DTYPES
    return known and x.dim() > 0 and n_steps <= MOST_STEPS


def gradients(
    gx: torch.Tensor,
    gv: torch.Tensor,
    x: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    dt: torch.Tensor | float,
    options: Options,
    wanted: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Of x, the operands and dt, each of its shape; wanted: which of these seven."""
    x, laid = x.contiguous(), Laid.of(x.shape)
    tensors, strides = placed(x, operands, dt, laid)
    each = (x, *operands, dt if isinstance(dt, torch.Tensor) else x)
    across = -(-laid.width // BLOCK)
    chunk = max(-(-laid.rows * across // PROGRAMS), 1)
    parts = -(-laid.rows // chunk)
    kinds = [
        _kind(operand, laid, name) * want
        for operand, want, name in zip(each, wanted, NAMES, strict=True)
    ]
    rooms, pitch = _rooms(x, each, kinds, laid, parts, shared=options.activated)
    if laid.rows:
        block = min(power(laid.width), BLOCK)
        backward[(parts, across)](
            gx.contiguous(), gv.contiguous(), x, *tensors,
            *(x if room is None else room for room in rooms), *strides,
            rows=laid.rows, size=laid.inner, width=laid.width, chunk=chunk,
            pitch=pitch, NUMBER=not isinstance(dt, torch.Tensor), BLOCK=block,
            num_warps=8, **dict(zip(NAMES, kinds, strict=True)),
            **options.facts(),
        )  # fmt: skip
    return [
        None if room is None else _reduced(room, operand, x.shape, kind)
        for room, operand, kind in zip(rooms, each, kinds, strict=True)
    ]


def _kind(operand: torch.Tensor, laid: Laid, name: str) -> int:
    summed = name in ("MU", "ALPHA", "BETA", "GATE") and laid.rows > 1
    row = operand.numel() == laid.width and operand.shape[-1:] == (laid.width,)
    return SUMMED if summed and row else WHOLE


def _rooms(
    x: torch.Tensor, each: tuple[torch.Tensor, ...], kinds: list[int], laid: Laid,
    parts: int, *, shared: bool,
) -> tuple[list[torch.Tensor | None], int]:  # fmt: skip
    """Memory for each gradient; shared: those of a controller lie as its thirds do."""

    def room(place: int, width: int) -> torch.Tensor:
        operand, kind = each[place], kinds[place]
        whole = kind == WHOLE and operand.shape == x.shape
        dtype = operand.dtype if whole else torch.float32
        shape = (laid.rows if kind == WHOLE else parts, width)
        return torch.empty(shape, dtype=dtype, device=x.device)

    found = [
        room(place, laid.width)
        if kind and not (shared and place in (3, 4, 5))
        else None
        for place, kind in enumerate(kinds)
    ]
    if not shared or not kinds[3]:
        return found, laid.width
    found[3:6] = room(3, 3 * laid.width).chunk(3, -1)
    return found, 3 * laid.width


def _reduced(
    room: torch.Tensor, operand: torch.Tensor, shape: torch.Size, kind: int
) -> torch.Tensor:
    """Sum a gradient over the axes along which its operand was broadcast."""
    if kind == SUMMED:
        return room.sum(0).reshape(operand.shape).to(operand.dtype)
    return room.reshape(shape).sum_to_size(operand.shape).to(operand.dtype)


def _split(coefficients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if len(coefficients) == 1:
        return tuple(coefficients[0].chunk(3, -1))
    return coefficients


def _joined(
    thirds: list[torch.Tensor | None], controller: torch.Tensor
) -> torch.Tensor | None:
    """A controller's gradient; where its thirds are already side by side, as it is."""
    first = thirds[0]
    if first is None:
        return None
    base = first._base
    if base is not None and base.numel() == controller.numel():
        return base.view(controller.shape)
    return torch.cat([third for third in thirds if third is not None], -1)
