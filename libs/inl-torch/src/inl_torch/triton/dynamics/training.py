"""Gradients of INL dynamics in one launch.

The state before each step is recomputed from the operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inl_torch.triton.common import DTYPES, power, spread
from inl_torch.triton.dynamics.dynamics import (
    BLOCK,
    Shape3d,
    broadcast_operands,
)
from inl_torch.triton.dynamics.dynamics import (
    Options as Options,
)
from inl_torch.triton.dynamics.dynamics import (
    advance as advance,
)
from inl_torch.triton.dynamics.kernels import backward

PROGRAMS = 1024
"""Most programs of the backward pass, each of which sums gradients over its rows."""

MAX_STEPS = 16
"""Most steps for which recomputing the states is cheaper than saving them."""

FULL, SUMMED = 1, 2
"""Kinds of gradients: with the shape of x, or a row summed over a program's rows."""

NAMES = ("X", "V", "MU", "ALPHA", "BETA", "GATE", "DT")


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
    wanted: Sequence[bool],
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
            SCALAR_DT=not isinstance(dt, torch.Tensor), BLOCK=block,
            num_warps=spread(8, x),
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


def join(thirds: list[torch.Tensor], controller: torch.Tensor) -> torch.Tensor:
    """Join a controller's gradient; no copy where its thirds are views of one
    tensor.
    """
    base = thirds[0]._base
    if base is not None and base.numel() == controller.numel():
        return base.view(controller.shape)
    return torch.cat(thirds, -1)
