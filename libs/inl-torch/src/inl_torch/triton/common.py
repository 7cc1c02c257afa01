"""Dtype and shape checks of the Triton kernels, and tile sizes."""

from __future__ import annotations

from typing import Any, Final

import torch

DTYPES: Final = ("float32", "bfloat16", "float16")

PREFERENCE: Final = 10
"""Preference over the eager kernels, whose preference is 0."""

WIDEST: Final = 16384
"""Most elements of a row that one program loads."""


def dtype_name(x: Any) -> str:
    """Return the name of a dtype, which that of a strict array is."""
    return str(x.dtype).removeprefix("torch.")


def refuse_dtype(x: Any) -> str | None:
    """Refuse dtypes that kernels cannot load."""
    name = dtype_name(x)
    if name in DTYPES:
        return None
    return f"takes {', '.join(DTYPES)}, found {name}"


def refuse_row(x: Any, width: int) -> str | None:
    """Refuse unsupported dtypes, and rows that do not fit one program."""
    if width > WIDEST:
        return f"rows of {width} elements, takes {WIDEST} at most"
    return refuse_dtype(x)


def power(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, as for Triton's
    tiles.
    """
    return 1 << max(n - 1, 0).bit_length()


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous in all but its first axis; a copy only if needed."""
    expected = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


WARPS: Final = {"xpu": 4}
"""Type of torch's devices -> warps that have the registers of one of NVIDIA's."""

MAX_WARPS: Final = 32


def spread(count: int, x: torch.Tensor) -> int:
    """Return the number of warps that have the registers of ``count`` on NVIDIA's."""
    return min(count * WARPS.get(x.device.type, 1), MAX_WARPS)


def warps(elements: int) -> int:
    """Return the number of warps for a tile of ``elements``."""
    return min(max(elements // 512, 1), 8)
