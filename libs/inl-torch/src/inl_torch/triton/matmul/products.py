"""Products of a few rows of activations with weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from inl.ops.norm import Norm
from inl_torch.eager.linear import product as library_product
from inl_torch.triton.common import dense, power
from inl_torch.triton.matmul.products_kernels import (
    SUM_COLUMNS,
    row_product,
    rows_product,
)
from inl_torch.triton.matmul.streamed import stream_product
from inl_torch.triton.norm import add_rms_norm
from inl_torch.triton.tuning import MAX_COLUMNS, Tuning, padded_rows

MIXED: Final = "triton+eager"
"""Name of kernels of which a product is the library's, by torch."""

MIN_DOT_COLUMNS = 16
"""Fewest columns of a tile of the matrix units."""


def library_is_faster(
    rows: int, dtype: Any, matrix: tuple[int, ...], tuning: Tuning
) -> str | None:
    """Return the reason why the device's library is faster for ``rows`` rows, if it
    is.
    """
    if rows == 1:
        return None
    if rows > tuning.max_rows:
        most = tuning.max_rows
        return f"takes {most} rows at most, found {rows}: the library is faster"
    if str(dtype).removeprefix("torch.") == "float32":
        return f"takes one row of float32, found {rows}: the library is faster"
    if is_wide(matrix, tuning) and rows > tuning.max_streamed_rows:
        size = " x ".join(map(str, matrix))
        return f"matrix of {size}, {rows} rows: the library is faster"
    return None


def refuse_library(
    rows: int, dtype: Any, matrices: Iterable[tuple[int, ...]], tuning: Tuning
) -> str | None:
    """Return why the library is faster at one of several products, if it is."""
    reasons = (library_is_faster(rows, dtype, each, tuning) for each in matrices)
    return next(filter(None, reasons), None)


def refuse_own(
    rows: int, dtype: Any, matrices: Iterable[tuple[int, ...]], tuning: Tuning
) -> str | None:
    """Return the opposite reason: no product is left to the library."""
    if refuse_library(rows, dtype, matrices, tuning):
        return None
    return f"{rows} rows: all products are Triton's"


def is_wide(matrix: tuple[int, ...], tuning: Tuning) -> bool:
    """Whether a matrix is so large that the products of several rows stream it."""
    return matrix[0] > tuning.max_outputs or matrix[1] > MAX_COLUMNS


def fastest(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: Tuning,
    *, kind: str = "plain",
) -> torch.Tensor:  # fmt: skip
    """Compute :func:`multiply`, or the same by the library where that is faster."""
    if library_is_faster(x.shape[0], x.dtype, weight.shape, tuning):
        return library_product(x, weight, bias)
    return multiply(x, weight, bias, tuning, kind=kind)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: Tuning,
    *, gated: str = "", kind: str = "plain",
) -> torch.Tensor:  # fmt: skip
    """Return ``x`` [T, K] @ ``weight`` [N, K].T + ``bias`` [N]: [T, N].

    gated: activation of the first half of the weight's rows, by which the second half
    is multiplied; the result is then [T, N / 2]. kind: key of the tile in the tuning.
    """
    if x.shape[0] > 1 and is_wide(weight.shape, tuning):
        return stream_product(x, weight, bias, tuning, gated=gated)
    x, n = dense(x), weight.shape[0] // (2 if gated else 1)
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    tensors = (x, x, None, x, weight, bias, y, y, x.stride(0), 0, 1.0)
    _launch(tensors, "gated" if gated else kind, tuning, gated)
    return y


def norm_product(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor | None,
    norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    tuning: Tuning, *, gated: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``residual + delta`` [T, K], and the product [S, N] of its norm.

    samples: [S] rows to which norm and product are restricted; all rows if ``None``.
    """
    k, n = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    tokens = residual.shape[0] if samples is None else samples.shape[0]
    separate = samples is not None or is_wide(weight.shape, tuning)
    if not tuning.fuses_norm(tokens, k) or (tokens > 1 and separate):
        summed, x = add_rms_norm(residual, delta, samples, norm, eps, tuning)
        return summed, multiply(x, weight, bias, tuning, gated=gated, kind="norm")
    residual, delta = dense(residual), dense(delta)
    y = torch.empty((tokens, n), dtype=residual.dtype, device=residual.device)
    summed = y
    if samples is None:
        summed = torch.empty((tokens, k), dtype=residual.dtype, device=residual.device)
    tensors = (
        residual, delta, samples, norm.weight, weight, bias, summed, y,
        residual.stride(0), delta.stride(0), eps,
    )  # fmt: skip
    _launch(tensors, "gated" if gated else "norm", tuning, gated, normed=True)
    return summed, y


def _launch(
    tensors: tuple[Any, ...], kind: str, tuning: Tuning, gated: str, *,
    normed: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel for one row or that for arguments."""
    x, delta, samples, norm_weight, weight, bias, summed, y, *numbers = tensors
    (tokens, n), k = y.shape, weight.shape[1]
    arguments = (
        x,
        delta,
        norm_weight,
        weight,
        weight if bias is None else bias,
        summed,
        y,
    )
    options = {
        "N": n, "K": k, "NORMED": normed, "HAS_BIAS": bias is not None,
        "GATED": bool(gated), "SILU": gated == "silu",
        "PDL": tuning.uses_pdl(tokens), **tuning.launch(tokens),
    }  # fmt: skip
    row_tile = padded_rows(tokens) if tokens > 1 else 1
    tile = tuning.tile(kind, n, k, row_tile)
    grid = (-(-n // tile.rows), 1)
    if tokens == 1:
        row_product[grid](
            x if samples is None else samples, *arguments, *numbers,
            GATHERS=samples is not None, ROWS=tile.rows, COLUMNS=tile.columns,
            num_warps=tile.warps, **options,
        )  # fmt: skip
        return
    if normed:
        # Each program stores some columns of the sum, so enough programs are needed.
        grid = (max(grid[0], -(-k // SUM_COLUMNS.value)), 1)
    warps = min(tile.warps, max(tile.columns // MIN_DOT_COLUMNS, 1))
    columns, last_columns = _steps(
        k, k if normed else tile.columns, warps * MIN_DOT_COLUMNS
    )
    stages = tuning.stages(tile, row_tile, gated=bool(gated))
    rows_product[grid](
        *arguments, *numbers, tokens, TOKENS=row_tile, ROWS=tile.rows,
        COLUMNS=max(columns // warps, MIN_DOT_COLUMNS),
        LAST_COLUMNS=last_columns // warps, WARPS=warps, STAGES=stages, num_warps=warps,
        **options,
    )  # fmt: skip


def _steps(k: int, columns: int, least: int) -> tuple[int, int]:
    """Return the columns of each loop step and 0, or, where ``columns`` reach ``k``,
    the columns of the only two steps.
    """
    if columns < k:
        return columns, 0
    first = max(power((k + 1) // 2), least)
    return first, max(power(k - first), least) if first < k else 0
