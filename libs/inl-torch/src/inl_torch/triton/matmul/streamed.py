"""Products of a few rows with matrices that are read once, at the memory's bandwidth.

Tiles of weights pass through a pipeline in shared memory, and the rows of activations
are the narrow side of the matrix units' tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.common import dense
from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning, padded_rows

LARGE_OUTPUTS = 1 << 13
"""Rows of a matrix from which programs outnumber the multiprocessors several times, so
that each needs fewer bytes in flight."""


class StreamTile(NamedTuple):
    """Launch parameters; measured on an H200 (Triton 3.6, bfloat16)."""

    rows: int
    """Rows of the matrix per program."""
    columns: int
    """Columns per pipeline stage."""
    warps: int
    stages: int

    def fitted_stages(self, tokens: int, tuning: Tuning, *, gated: bool) -> int:
        """Return the stages that fit the chip's shared memory."""
        rows = tokens + self.rows * (2 if gated else 1)
        return tuning.fitted_stages(self.stages, 2 * self.columns * rows)


def stream_tile(n: int, tokens: int, *, gated: bool) -> StreamTile:
    """Return the tile for a matrix of ``n`` rows and a padded number of tokens."""
    if tokens <= 16:
        if gated:
            return StreamTile(64, 256, 4, 3)
        return StreamTile(32, 256, 2, 3 if n > LARGE_OUTPUTS else 6)
    if gated or n > LARGE_OUTPUTS:
        return StreamTile(64, 128, 4, 2)
    return StreamTile(32, 256, 2, 6)


@triton.jit
def load_tile(
    at: tensor, is_row: tensor, columns: tensor, k: tensor, EVEN: tl.constexpr
) -> tensor:
    """Load a tile of pointers, 0 where a row or column is out of bounds."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=is_row[:, None] & (columns < k)[None, :], other=0)


@triton.jit
def stream_sums(
    x: tensor, weight: tensor, up: tensor, row: tensor, token: tensor,
    x_stride: tensor, tokens: tensor, n: tensor, k: tensor, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Sums [ROWS, TOKENS] of a tile of ``weight`` [n, k], and of ``up`` if ``GATED``.

    EVEN: whether tiles divide the matrix.
    """
    column = tl.arange(0, COLUMNS)
    is_row = row < n
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    x_at = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    up_acc = acc
    for start in tl.range(0, k, COLUMNS, num_stages=STAGES):
        inside = (token < tokens)[:, None] & (start + column < k)[None, :]
        a = tl.trans(tl.load(x_at + start, mask=inside, other=0))
        w = load_tile(weight + at + start, is_row, start + column, k, EVEN)
        acc = tl.dot(w, a, acc, input_precision="ieee")
        if GATED:
            w_up = load_tile(up + at + start, is_row, start + column, k, EVEN)
            up_acc = tl.dot(w_up, a, up_acc, input_precision="ieee")
    return acc, up_acc


@triton.jit
def streamed_product(
    x: tensor, weight: tensor, bias: tensor, y: tensor, x_stride: tensor,
    tokens: tensor, n: tensor, k: tensor, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x`` [tokens, k] with ``weight`` [n, k], or [2 n, k] if ``GATED``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    pdl_sync(PDL)
    acc, up_acc = stream_sums(
        x, weight, weight + n.to(tl.int64) * k, row, token, x_stride, tokens, n, k,
        ROWS, TOKENS, COLUMNS, STAGES, EVEN, GATED,
    )  # fmt: skip
    if GATED:
        acc = activate_gate(acc, up_acc, SILU)
    if HAS_BIAS:
        offset = tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
        acc += offset[:, None]
    both = (token < tokens)[None, :] & (row < n)[:, None]
    tl.store(y + token.to(tl.int64)[None, :] * n + row[:, None], acc, mask=both)


def stream_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: Tuning,
    *, gated: str = "",
) -> torch.Tensor:  # fmt: skip
    """Return ``x`` [T, K] @ ``weight`` [N, K].T + ``bias`` [N]: [T, N].

    gated: activation of the first half of the weight's rows, by which the second half
    is multiplied; the result is then [T, N / 2].
    """
    x = dense(x)
    (tokens, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    padded = padded_rows(tokens)
    tile = stream_tile(n, padded, gated=bool(gated))
    streamed_product[(-(-n // tile.rows),)](
        x, weight, weight if bias is None else bias, y, x.stride(0), tokens, n, k,
        TOKENS=padded, ROWS=tile.rows, COLUMNS=tile.columns,
        STAGES=tile.fitted_stages(padded, tuning, gated=bool(gated)),
        EVEN=n % tile.rows == 0 and k % tile.columns == 0, HAS_BIAS=bias is not None,
        GATED=bool(gated), SILU=gated == "silu", PDL=tuning.uses_pdl(tokens),
        num_warps=tile.warps, **tuning.launch(tokens),
    )  # fmt: skip
    return y
