"""What the Triton kernels share: refusals and sizes."""

from __future__ import annotations

from typing import Any, Final

import torch

DTYPES: Final = ("float32", "bfloat16", "float16")

PREFERENCE: Final = 10
"""Above the eager kernels, which have none."""

WIDEST: Final = 16384
"""Most elements of a row that one program holds."""


def refuse_dtype(x: Any) -> str | None:
    """Refuse what a program cannot load; a strict array's dtype is a name."""
    name = str(x.dtype).removeprefix("torch.")
    if name in DTYPES:
        return None
    return f"takes {', '.join(DTYPES)}, found {name}"


def refuse_row(x: Any, width: int) -> str | None:
    """Refuse odd dtypes, and rows that one program cannot hold."""
    if width > WIDEST:
        return f"rows of {width} elements, takes {WIDEST} at most"
    return refuse_dtype(x)


def power(n: int) -> int:
    """The next power of two: Triton's tiles have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` with everything after its first axis in one piece; a view if it can be."""
    expected = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def warps(elements: int) -> int:
    """Warps for a program whose tile has so many elements."""
    return min(max(elements // 512, 1), 8)
