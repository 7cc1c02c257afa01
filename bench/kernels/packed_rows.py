"""Rows of products with packed weights of 4 or 8 bits."""

# ruff: noqa: ARG005 - every way takes all of a row's inputs

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from inl_cuda.tuning import tuning
from inl_torch.triton.quantized import products as packed_products
from inl_torch.triton.quantized.packed import FLOAT8, Packed
from kernels.rows import Row, weight, x

KINDS = {
    "Q4_1": (torch.uint8, 32, True),
    "Q8_0": (torch.int8, 32, False),
    "int4 of 64": (torch.uint8, 64, False),
    "fp8 a row": (FLOAT8, 0, False),
}
"""Codes, columns with one scale (0: all of a row's), and whether there are offsets."""


def values(codes: Any, scales: Any, offsets: Any = None) -> torch.Tensor:
    """Dequantize the weights [N, K] to float32, in plain torch."""
    if codes.dtype == torch.uint8:
        half = codes.view(len(codes), -1, 16)
        codes = torch.cat((half & 15, half >> 4), -1).flatten(1)
        codes = codes.float() if offsets is not None else codes.float() - 8
    grouped = codes.float().view(*scales.shape, -1) * scales.float()[:, :, None]
    if offsets is not None:
        grouped = grouped + offsets.float()[:, :, None]
    return grouped.flatten(1)


def product(kind: str, tokens: int, n: int, k: int) -> Row:
    codes_type, group, has_offsets = KINDS[kind]
    groups = k // (group or k)

    def make() -> tuple[Any, ...]:
        scales = torch.rand(n, groups, device="cuda").half() / 100
        if codes_type == FLOAT8:
            codes = torch.randn(n, k, device="cuda").to(FLOAT8)
        elif codes_type == torch.int8:
            codes = torch.randint(-127, 128, (n, k), device="cuda", dtype=codes_type)
        else:
            size = (n, k // 2)
            codes = torch.randint(0, 256, size, device="cuda", dtype=codes_type)
        offsets = (-8 * scales,) if has_offsets else ()
        return x(tokens, k), weight(n, k), codes, scales, *offsets

    def ours(_run: Any, a: Any, _w: Any, *parts: Any) -> Any:
        return packed_products.multiply(a, Packed(*parts), None, tuning(a.device))

    codes_bytes = n * k // (2 if codes_type == torch.uint8 else 1)
    return Row(
        "linear", f"{kind}, {tokens} rows, {n}x{k}", make, ours,
        lambda a, w, *parts: F.linear(a, values(*parts).to(a.dtype)),
        lambda a, w, *parts: F.linear(a, w),
        flops=2 * tokens * n * k, outputs=2 * tokens * n,
        read=codes_bytes + 2 * n * groups * (2 if has_offsets else 1) + 2 * tokens * k,
    )  # fmt: skip


SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (3072, 576))

ROWS = (
    *(product(kind, 1, *shape) for shape in SHAPES for kind in ("Q4_1", "Q8_0")),
    *(product(kind, 1, 28672, 4096) for kind in ("int4 of 64", "fp8 a row")),
    *(product(kind, rows, 28672, 4096) for rows in (4, 16, 32) for kind in KINDS),
    *(product(kind, 16, *shape) for shape in SHAPES[::2] for kind in ("Q4_1", "Q8_0")),
)
