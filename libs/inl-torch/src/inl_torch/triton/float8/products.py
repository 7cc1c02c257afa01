"""Products of rows that are rounded to float8 with weights in E4M3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from inl.ops.norm import Norm
from inl.spec.activation_quant import FLOAT8
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.common import dense, dtype_name, power
from inl_torch.triton.counters import Counters
from inl_torch.triton.float8 import weights
from inl_torch.triton.float8.kernels import quantize, streamed_float8
from inl_torch.triton.float8.weights import FLOAT8_ROWS, Float8
from inl_torch.triton.matmul.activation import gated_activation
from inl_torch.triton.matmul.stored import Matrix, Plain
from inl_torch.triton.matmul.stored_kernels import MatrixSize, stored_kernels
from inl_torch.triton.tuning import Tuning

MAX_STREAMED: Final = 128
"""Most rows that stream a matrix. For more, the device's library is faster."""


class Rows(NamedTuple):
    """Activations in float8."""

    codes: torch.Tensor
    """[T, K], E4M3."""
    scales: torch.Tensor
    """[T], float32."""
    sums: torch.Tensor
    """[T, groups], float16: sums of groups of codes, if asked for."""


class StreamTile(NamedTuple):
    """Launch parameters of a streamed product; measured on an H200 (Triton 3.6)."""

    rows: int
    """Rows of the matrix per program."""
    columns: int
    """Columns per pipeline stage."""
    splits: int
    """Programs that share the columns of a tile."""
    warps: int
    stages: int


def float8_tile(
    n: int, k: int, tokens: int, tuning: Tuning, *, gated: bool
) -> StreamTile:
    """Return the tile for a matrix [n, k] in E4M3 and a padded number of tokens."""
    if gated:
        if tokens <= 32:
            return StreamTile(128, 256, 1, 8, 3)
        return StreamTile(128, 128, 1, 8, 5) if tokens <= 64 else _SMALL
    columns, stages = (512, 3) if tokens <= 64 else (256, 4)
    few = 2 * (n // 64) <= tuning.processors
    splits = 2 if few and (tokens <= 64 or k > 8192) else 1
    return StreamTile(64, columns, splits, 4, stages)


_SMALL = StreamTile(64, 128, 1, 4, 6)

AHEAD = 4
"""Lines of 128 bytes of each row that are fetched before the previous kernel ends."""


def quantized(
    x: torch.Tensor, tuning: Tuning, *, gated: str = "", group: int = 0
) -> Rows:
    """Round each row of ``x`` [T, K] to E4M3.

    gated: activation of the first half of each row, by which the second half is
    multiplied first. group: columns whose codes are added; 0 for none.
    """
    return _quantize(dense(x), None, tuning, gated, group)[1]


def normed(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float, tuning: Tuning,
    *, group: int = 0,
) -> tuple[torch.Tensor, Rows]:  # fmt: skip
    """Return ``residual + delta`` [T, K], and its norm in E4M3."""
    return _quantize(dense(residual), (dense(delta), norm, eps), tuning, "", group)


def _quantize(
    x: torch.Tensor, added: tuple[torch.Tensor, Norm, float] | None, tuning: Tuning,
    gated: str, group: int,
) -> tuple[torch.Tensor, Rows]:  # fmt: skip
    tokens, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    place = x.device
    codes = torch.empty((tokens, width), dtype=weights.FLOAT8, device=place)
    scales = torch.empty(tokens, dtype=torch.float32, device=place)
    groups = width // group if group else 0
    sums = torch.empty((tokens, groups), dtype=torch.float16, device=place)
    delta, gain, eps, summed = x, x, 0.0, x
    if added is not None:
        delta, norm, eps = added
        gain = norm.weight
        summed = torch.empty((tokens, width), dtype=x.dtype, device=place)
    block = power(width)
    most = 16 if block <= 1 << 14 else 32
    quantize[(tokens,)](
        x, delta, gain, summed, codes, scales, sums if groups else scales, x.stride(0),
        delta.stride(0), width, eps, NORMED=added is not None, GATED=bool(gated),
        SILU=gated == "silu", WIDTH=group, BLOCK=block, PDL=tuning.uses_pdl(tokens),
        num_warps=min(max(block // 512, 1), most), **tuning.launch(tokens),
    )  # fmt: skip
    return summed, Rows(codes, scales, sums)


class Products:
    """Products with streamed matrices, and the counters of one engine's kernels."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._counters = Counters()

    def multiply(
        self, x: Rows, w: Matrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N]: [T, N]."""
        assert isinstance(w, Float8), "rows in the compute dtype multiply it"
        if len(x.codes) <= MAX_STREAMED:
            return self._stream(x, w, bias, dtype)
        return multiply(x, w, bias, dtype)

    def _stream(
        self, x: Rows, w: Float8, bias: torch.Tensor | None, dtype: torch.dtype,
        gated: str = "",
    ) -> torch.Tensor:  # fmt: skip
        (tokens, k), n = x.codes.shape, w.shape[0] // (2 if gated else 1)
        tuning, padded = self.tuning, max(power(tokens), 16)
        tile = float8_tile(n, k, padded, tuning, gated=bool(gated))
        tiles, columns = -(-n // tile.rows), min(tile.columns, max(power(k), 32))
        step = columns * (padded + tile.rows * (2 if gated else 1))
        y, parts, counters = self._results(x, n, tiles, tile.splits, dtype)
        streamed_float8[(tiles, tile.splits)](
            x.codes, x.scales, *w, w.scales if bias is None else bias, y, parts,
            counters, tokens, n, k, TOKENS=padded, ROWS=tile.rows, COLUMNS=columns,
            SPLITS=tile.splits, STAGES=tuning.fitted_stages(tile.stages, step),
            EVEN=n % tile.rows == 0 and k % columns == 0, HAS_BIAS=bias is not None,
            GATED=bool(gated), SILU=gated == "silu", PDL=tuning.uses_pdl(tokens),
            AHEAD=AHEAD if k >= 2048 else 0, num_warps=tile.warps,
            **tuning.launch(tokens),
        )  # fmt: skip
        return y

    def _results(
        self, x: Rows, n: int, tiles: int, splits: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return memory for the result, for its parts and their counters."""
        tokens, place = len(x.codes), x.codes.device
        y = torch.empty((tokens, n), dtype=dtype, device=place)
        if splits == 1:
            return y, x.scales, x.scales
        parts = torch.empty((splits, tokens, n), dtype=torch.float32, device=place)
        return y, parts, self._counters.each(place, tiles, splits)

    def product(
        self, x: torch.Tensor, w: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N]: [T, N].

        Rows in float32 multiply decoded weights.
        """
        if isinstance(w, Plain) or x.dtype == torch.float32:
            return library_product(x, decoded(w, x.dtype), bias)
        return self.multiply(quantized(x, self.tuning), w, bias, x.dtype)

    def norm_product(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Float8, bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the product of its norm: [T, N]."""
        summed, rows = normed(residual, delta, norm, eps, self.tuning)
        return summed, self.multiply(rows, w, bias, residual.dtype)

    def mlp(self, x: torch.Tensor, w: StackedMlp, activation: str) -> torch.Tensor:
        """Return the feed-forward layer of ``x`` [T, K]."""
        if x.dtype == torch.float32:
            gate, up = self.product(x, w.gate_up, None).chunk(2, 1)
            inner = gated_activation(gate, up, activation=activation)
            return self.product(inner, w.down, None)
        return self._mlp(quantized(x, self.tuning), w, x.dtype, activation)

    def norm_mlp(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: StackedMlp, activation: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the layer of its norm."""
        summed, rows = normed(residual, delta, norm, eps, self.tuning)
        return summed, self._mlp(rows, w, residual.dtype, activation)

    def _mlp(
        self, x: Rows, w: StackedMlp, dtype: torch.dtype, activation: str
    ) -> torch.Tensor:
        gate_up, down = w.gate_up, w.down
        assert isinstance(gate_up, Float8), "gate and up are divided by rows"
        if len(x.codes) <= MAX_STREAMED:
            inner = self._stream(x, gate_up, None, dtype, activation)
            return self.product(inner, down, None)
        both = self.multiply(x, gate_up, None, dtype)
        if isinstance(down, Plain):
            inner = gated_activation(*both.chunk(2, 1), activation=activation)
            return self.product(inner, down, None)
        rows = quantized(both, self.tuning, gated=activation)
        return self.multiply(rows, down, None, dtype)

    def technologies(
        self, x: Any, matrix: MatrixSize, down: MatrixSize | None = None
    ) -> set[str]:
        """Return what computes a product, or a feed-forward layer."""

        def product(size: MatrixSize) -> set[str]:
            if size.is_decoded or dtype_name(x) == "float32":
                return {"eager"}
            return {"triton"} if x.shape[0] <= MAX_STREAMED else {"triton", "eager"}

        if down is None:
            return product(matrix)
        return {"triton"} | product(matrix) | product(down)

    def refuse_norm(self, residual: Any, _: MatrixSize) -> str | None:
        """Refuse rows that multiply decoded weights."""
        if str(residual.dtype).endswith("float32"):
            return f"takes bfloat16 and float16, found {residual.dtype}"
        return None


def multiply(
    x: Rows, w: Float8, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N], by the device's library."""
    # The only product of float8 in torch before 2.10; its result is bfloat16.
    y = torch._scaled_mm(
        x.codes, w.codes.t(), scale_a=x.scales[:, None], scale_b=w.scales[None, :],
        out_dtype=torch.bfloat16, use_fast_accum=True,
    ).to(dtype)  # fmt: skip
    return y if bias is None else y + bias


def decoded(w: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K]."""
    if isinstance(w, Plain):
        return w.weight
    assert isinstance(w, Float8), "of no other layout"
    return (w.codes.float() * w.scales[:, None]).to(dtype)


def float8_kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels for weights that are stored in E4M3."""
    return stored_kernels(
        "float8", ("triton", "triton+eager", "eager"), ("triton", "triton+eager"),
        FLOAT8_ROWS, weights.refuse_float8, weights.stacked_float8, Products(tuning),
        activation_quant=FLOAT8,
    )  # fmt: skip
