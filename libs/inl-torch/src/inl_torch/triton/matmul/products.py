"""Products of a decoding step's few rows with weights, cut for a chip."""

from __future__ import annotations

from typing import Any

import torch

from inl.ops.norm import Norm
from inl_torch.eager.linear import product as library_product
from inl_torch.triton.common import dense, power
from inl_torch.triton.matmul.products_kernels import SHARE, row_product, rows_product
from inl_torch.triton.norm import added_norm
from inl_torch.triton.tuning import WIDE, Tuning, padded

DEEP = 16
"""Columns of the smallest tile of the matrix units."""


def left_to_library(
    rows: int, dtype: Any, matrix: tuple[int, ...], tuning: Tuning
) -> str | None:
    """Say why the device's own library is better for so many rows, where it is."""
    if rows == 1:
        return None
    if rows > tuning.few_rows:
        most = tuning.few_rows
        return f"takes {most} rows at most, found {rows}: the library is faster"
    if str(dtype).removeprefix("torch.") == "float32":
        return f"takes one row of float32, found {rows}: the library is faster"
    if matrix[0] > tuning.most_outputs or matrix[1] > WIDE:
        size = " x ".join(map(str, matrix))
        return f"of a matrix of {size}, for {rows} rows, the library makes more"
    return None


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: Tuning,
    *, gated: str = "", kind: str = "plain",
) -> torch.Tensor:  # fmt: skip
    """``x`` [T, K] times the transpose of ``weight`` [N, K]: [T, N].

    gated: the activation of the first half of the rows, which multiplies the second.
    kind: whose tile to use.
    """
    if not gated and left_to_library(x.shape[0], x.dtype, weight.shape, tuning):
        return library_product(x, weight, bias)
    x, n = dense(x), weight.shape[0] // (2 if gated else 1)
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    tensors = (x, x, None, x, weight, bias, y, y, x.stride(0), 0, 1.0)
    _launch(tensors, "gated" if gated else kind, tuning, gated)
    return y


def normed(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor | None,
    norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    tuning: Tuning, *, gated: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sum [T, K], and the product [S, N] of its norm; S is T where all is taken."""
    k, n = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    tokens = residual.shape[0] if samples is None else samples.shape[0]
    if not tuning.norms(tokens, k) or (tokens > 1 and samples is not None):
        total, x = added_norm(residual, delta, samples, norm, eps, tuning)
        return total, multiply(x, weight, bias, tuning, gated=gated, kind="norm")
    residual, delta = dense(residual), dense(delta)
    y = torch.empty((tokens, n), dtype=residual.dtype, device=residual.device)
    total = y
    if samples is None:
        total = torch.empty((tokens, k), dtype=residual.dtype, device=residual.device)
    tensors = (
        residual, delta, samples, norm.weight, weight, bias, total, y,
        residual.stride(0), delta.stride(0), eps,
    )  # fmt: skip
    _launch(tensors, "gated" if gated else "norm", tuning, gated, normed=True)
    return total, y


def _launch(
    tensors: tuple[Any, ...], kind: str, tuning: Tuning, gated: str, *,
    normed: bool = False,
) -> None:  # fmt: skip
    """Launch the program for one row or that for several, with the tile of its kind."""
    x, delta, samples, gain, weight, bias, total, y, *numbers = tensors
    (tokens, n), k = y.shape, weight.shape[1]
    several = (x, delta, gain, weight, weight if bias is None else bias, total, y)
    options = {
        "N": n, "K": k, "NORMED": normed, "BIASED": bias is not None,
        "GATED": bool(gated), "SILU": gated == "silu",
        "EARLY": tuning.starts_early(tokens), **tuning.launch(tokens),
    }  # fmt: skip
    held = padded(tokens) if tokens > 1 else 1
    tile = tuning.tile(kind, n, k, held)
    grid = (-(-n // tile.rows), 1)
    if tokens == 1:
        row_product[grid](
            x if samples is None else samples, *several, *numbers,
            TAKES=samples is not None, ROWS=tile.rows, COLUMNS=tile.columns,
            num_warps=tile.warps, **options,
        )  # fmt: skip
        return
    if normed:
        # Each program stores its share of the sum, so there are as many as shares.
        grid = (max(grid[0], -(-k // SHARE.value)), 1)
    warps = min(tile.warps, max(tile.columns // DEEP, 1))
    columns, rest = _steps(k, k if normed else tile.columns, warps * DEEP)
    stages = tuning.stages(tile, held, gated=bool(gated))
    rows_product[grid](
        *several, *numbers, tokens, TOKENS=held, ROWS=tile.rows,
        COLUMNS=max(columns // warps, DEEP), REST=rest // warps, PARTS=warps,
        STAGES=stages, num_warps=warps, **options,
    )  # fmt: skip


def _steps(k: int, columns: int, least: int) -> tuple[int, int]:
    """Columns of a loop's steps, and 0; or, where ``columns`` reach ``k``, of the two
    steps that are all.
    """
    if columns < k:
        return columns, 0
    first = max(power((k + 1) // 2), least)
    return first, max(power(k - first), least) if first < k else 0
