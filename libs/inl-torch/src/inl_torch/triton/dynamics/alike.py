"""One step of INL dynamics on contiguous tensors of one shape and dtype.

The kernels are those of other operands; what these need of each call, such as strides
of broadcast operands, takes several times as long as the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from inl_torch.triton.common import power
from inl_torch.triton.dynamics.dynamics import BLOCK
from inl_torch.triton.dynamics.kernels import backward, forward
from inl_torch.triton.dynamics.training import FULL, NAMES, PROGRAMS
from inl_torch.triton.launches import Launch

PLAIN = {"SCALAR_DT": True, "ACTIVATED": False, "CAPPED": False, "LIMITED": False}


def advance(operands: Sequence[torch.Tensor], dt: float) -> tuple[torch.Tensor, ...]:
    """Return the new position and velocity.

    operands: x, v, mu, alpha, beta, gate [..., D], not empty.
    """
    x = operands[0]
    width = x.shape[-1]
    new_x, new_v = torch.empty_like(x), torch.empty_like(x)
    strides = (width, 0, 1) * 5
    _forward(x.numel() // width, width)(
        *operands, dt, new_x, new_v, *strides, 0, 0, 0, 1, width, 1, 0.0, 0.0
    )
    return new_x, new_v


def gradients(
    gx: torch.Tensor,
    gv: torch.Tensor,
    operands: Sequence[torch.Tensor],
    dt: float,
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Return the gradients of the operands that are ``needed``."""
    x = operands[0]
    width = x.shape[-1]
    rows = x.numel() // width
    found = [torch.empty_like(x) if want else None for want in needed]
    launch, rows_per_program = _backward(rows, width, *needed)
    strides = (width, 0, 1) * 5
    launch(
        gx.contiguous(), gv.contiguous(), *operands, dt,
        *(x if each is None else each for each in found), x, *strides, 0, 0, 0, rows, 1,
        width, rows_per_program, width, 1, 0.0, 0.0,
    )  # fmt: skip
    return found


@lru_cache(maxsize=256)
def _forward(rows: int, width: int) -> Launch:
    block = min(power(width), BLOCK)
    return Launch(
        forward, (rows, -(-width // block)), BLOCK=block, num_warps=4, **PLAIN
    )


@lru_cache(maxsize=256)
def _backward(rows: int, width: int, *needed: bool) -> tuple[Launch, int]:
    columns = -(-width // BLOCK)
    rows_per_program = max(-(-rows * columns // PROGRAMS), 1)
    kinds = {
        name: FULL * want for name, want in zip(NAMES, (*needed, False), strict=True)
    }
    grid = -(-rows // rows_per_program), columns
    block = min(power(width), BLOCK)
    launch = Launch(backward, grid, BLOCK=block, num_warps=8, **PLAIN, **kinds)
    return launch, rows_per_program
