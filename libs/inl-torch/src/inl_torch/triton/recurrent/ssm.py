"""Launch of the scan of Mamba-2: one program per row, head and strip of columns.

Rows of several tokens are computed in products of chunks, which begin where a row of a
step does: a text that is divided otherwise has other bits. In float32, whose products
have no tensor cores, and where the products' registers do not suffice, on GPUs that are
not NVIDIA's, each token is computed after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from inl.ops.ssm import Ssm
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype, spread
from inl_torch.triton.recurrent.recurrent import COLUMNS, WIDEST_KEY
from inl_torch.triton.recurrent.ssm_kernels import ssm_rows

CHUNK, STRIP = 32, 64
"""Tokens of a product, and most columns of a head's matrix in its program: as many as
8 warps have registers for, with keys of up to 128 elements. Half of both for more."""

LEAST = 16
"""Fewest elements of the inner axis of a product."""


def ssm_scan(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor,
    table: torch.Tensor, step: Step, w: Ssm,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    x, b, c, dt = map(dense, (x, b, c, dt))
    (tokens, heads, width), (groups, dim) = x.shape, b.shape[1:]
    rows, high = step.slots.shape[0], power(dim)
    chunk, strip, count = 1, COLUMNS, spread(1, x)
    if tokens > rows and multiplies(x):
        high, share = max(high, LEAST), 2 if high > 128 else 1
        chunk, count = CHUNK // share, 8
        strip = min(max(power(width), LEAST), STRIP // share)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # The range of float16 may be too small for the sums of the state. One product in
    # tf32 drops bits of them, always towards zero: more than float16 rounds away.
    is_wide = x.dtype == torch.float16
    ssm_rows[(rows, heads, -(-width // strip))](
        x, b, c, dt, w.rate, w.shift, w.skip, table, out, step.starts, step.positions,
        step.slots, step.used_counts, *(each.stride(0) for each in (x, b, c, dt)),
        tokens, dim, width, heads // groups, heads, DIM=high, WIDTH=strip, CHUNK=chunk,
        KIND=tl.float32 if is_wide else tl.bfloat16,
        PRECISION="tf32x3" if is_wide else "ieee", num_warps=count,
    )  # fmt: skip
    return out, table


def multiplies(x: torch.Tensor) -> bool:
    """Whether several tokens of a row are computed by products."""
    others = torch.version.hip is not None or x.device.type == "xpu"
    return x.dtype != torch.float32 and not others


def _refuse(_x: Any, b: Any, *_: Any) -> str | None:
    if b.shape[-1] > WIDEST_KEY:
        return f"keys of {b.shape[-1]} elements, takes {WIDEST_KEY} at most"
    return refuse_dtype(b)


KERNELS = (
    Kernel("ssm_scan", "triton", ssm_scan, refuse=_refuse, preference=PREFERENCE),
)
