"""Ops whose rows are rounded to float8, over weights of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from inl.ops.norm import Norm
from inl.spec.activation_quant import FLOAT8
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.linear import product as library_product
from inl_torch.triton.attention.rope_attend import decode_attention, plan
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.counters import Counters
from inl_torch.triton.float8 import weights
from inl_torch.triton.float8.int4_kernels import streamed_int4, unpack_int4
from inl_torch.triton.float8.kernels import quantize, streamed_float8
from inl_torch.triton.float8.weights import (
    FLOAT8_ROWS,
    INT4_CHUNKS,
    Float8,
    Int4,
    Matrix,
    Plain,
    StreamedLinear,
    StreamedMlp,
    StreamedQkv,
    packers,
)
from inl_torch.triton.matmul.activation import gated_activation, refuse_activation
from inl_torch.triton.matmul.fused import refuse_attend
from inl_torch.triton.tuning import Tuning

MAX_STREAMED = {FLOAT8_ROWS: 128, INT4_CHUNKS: 128}
"""Most rows that stream a matrix. For more, the device's library is faster: with rows
in float8, or with a decoded matrix of 4 bits."""

TOKENS = 64
"""Most rows of a program that multiplies codes of 4 bits: it has two sums of each."""


class Rows(NamedTuple):
    """Activations in float8."""

    codes: torch.Tensor
    """[T, K], E4M3."""
    scales: torch.Tensor
    """[T], float32."""
    sums: torch.Tensor
    """[T, groups], float16: sums of groups of codes; empty for matrices in E4M3."""


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


def int4_tile(n: int, k: int, width: int, tokens: int, tuning: Tuning) -> StreamTile:
    """Return the tile for a matrix [n, k] in groups of ``width`` codes of 4 bits."""
    programs = (3 if tokens <= 16 else 2) * tuning.processors
    splits = min(max(programs // -(-n // 64), 1), max(k // (4 * width), 1), 8)
    return StreamTile(64, 4 * width, splits, 4, 3)


class Products:
    """Products with streamed matrices, and the counters of one engine's kernels."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._counters = Counters()

    def quantized(self, x: torch.Tensor, w: Matrix, *, gated: str = "") -> Rows:
        """Round each row of ``x`` [T, K] to E4M3, to multiply ``w``.

        gated: activation of the first half of each row, by which the second half is
        multiplied first.
        """
        return self._quantize(dense(x), None, w, gated)[1]

    def normed(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Matrix,
    ) -> tuple[torch.Tensor, Rows]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and its norm in E4M3."""
        return self._quantize(dense(residual), (dense(delta), norm, eps), w)

    def _quantize(
        self, x: torch.Tensor, added: tuple[torch.Tensor, Norm, float] | None,
        w: Matrix, gated: str = "",
    ) -> tuple[torch.Tensor, Rows]:  # fmt: skip
        tokens, width = x.shape[0], w.shape[1]
        place, tuning = x.device, self.tuning
        codes = torch.empty((tokens, width), dtype=weights.FLOAT8, device=place)
        scales = torch.empty(tokens, dtype=torch.float32, device=place)
        group = w.width if isinstance(w, Int4) else 0
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
            x, delta, gain, summed, codes, scales, sums if groups else scales,
            x.stride(0), delta.stride(0), width, eps, NORMED=added is not None,
            GATED=bool(gated), SILU=gated == "silu", WIDTH=group, BLOCK=block,
            PDL=tuning.uses_pdl(tokens), num_warps=min(max(block // 512, 1), most),
            **tuning.launch(tokens),
        )  # fmt: skip
        return summed, Rows(codes, scales, sums)

    def multiply(
        self, x: Rows, w: Matrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N]: [T, N]."""
        if isinstance(w, Int4):
            return self._stream_int4(x, w, bias, dtype)
        assert isinstance(w, Float8), "rows in the compute dtype multiply it"
        if len(x.codes) <= MAX_STREAMED[FLOAT8_ROWS]:
            return self._stream_float8(x, w, bias, dtype)
        # The only product of float8 in torch before 2.10; its result is bfloat16.
        y = torch._scaled_mm(
            x.codes, w.codes.t(), scale_a=x.scales[:, None], scale_b=w.scales[None, :],
            out_dtype=torch.bfloat16, use_fast_accum=True,
        ).to(dtype)  # fmt: skip
        return y if bias is None else y + bias

    def _stream_float8(
        self, x: Rows, w: Float8, bias: torch.Tensor | None, dtype: torch.dtype,
        gated: str = "",
    ) -> torch.Tensor:  # fmt: skip
        (tokens, k), n = x.codes.shape, w.shape[0] // (2 if gated else 1)
        tuning, padded = self.tuning, max(power(tokens), 16)
        tile = float8_tile(n, k, padded, tuning, gated=bool(gated))
        tiles, columns = -(-n // tile.rows), min(tile.columns, max(power(k), 32))
        y, parts, counters = self._results(x, n, tiles, tile.splits, dtype)
        streamed_float8[(tiles, tile.splits)](
            x.codes, x.scales, *w, w.scales if bias is None else bias, y, parts,
            counters, tokens, n, k, TOKENS=padded, ROWS=tile.rows, COLUMNS=columns,
            SPLITS=tile.splits, STAGES=tile.stages,
            EVEN=n % tile.rows == 0 and k % columns == 0, HAS_BIAS=bias is not None,
            GATED=bool(gated), SILU=gated == "silu", PDL=tuning.uses_pdl(tokens),
            AHEAD=AHEAD if k >= 2048 else 0, num_warps=tile.warps,
            **tuning.launch(tokens),
        )  # fmt: skip
        return y

    def _stream_int4(
        self, x: Rows, w: Int4, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        (tokens, k), n, tuning = x.codes.shape, w.shape[0], self.tuning
        padded = min(max(power(tokens), 16), TOKENS)
        tile = int4_tile(n, k, w.width, padded, tuning)
        tiles, repeats = -(-n // tile.rows), -(-tokens // padded)
        y, parts, counters = self._results(x, n, tiles * repeats, tile.splits, dtype)
        streamed_int4[(tiles, tile.splits, repeats)](
            *x, w.codes, w.scales.view(torch.int32), w.offsets,
            w.scales if bias is None else bias, y, parts, counters, tokens, n, k,
            TOKENS=padded, ROWS=tile.rows, SPLITS=tile.splits, STAGES=tile.stages,
            EVEN=n % tile.rows == 0 and k % tile.columns == 0,
            HAS_BIAS=bias is not None, PDL=tuning.uses_pdl(tokens), WIDTH=w.width,
            num_warps=tile.warps, **tuning.launch(tokens),
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
        """Like :meth:`multiply`, of rows in the compute dtype.

        Rows in float32, and many rows with 4 bits, multiply decoded weights instead.
        """
        if self.decodes(x, w):
            return library_product(x, decoded(w, x.dtype), bias)
        return self.multiply(self.quantized(x, w), w, bias, x.dtype)

    def decodes(self, x: torch.Tensor, w: Matrix) -> bool:
        """Whether rows [T, K] multiply decoded weights."""
        many = isinstance(w, Int4) and len(x) > MAX_STREAMED[INT4_CHUNKS]
        return many or isinstance(w, Plain) or x.dtype == torch.float32

    def mlp(
        self, x: Rows, w: StreamedMlp, dtype: torch.dtype, activation: str
    ) -> torch.Tensor:
        """Return the feed-forward layer of rows in float8."""
        most = MAX_STREAMED[FLOAT8_ROWS]
        if isinstance(w.gate_up, Float8) and len(x.codes) <= most:
            inner = self._stream_float8(x, w.gate_up, None, dtype, activation)
            return self.product(inner, w.down, None)
        both = self.multiply(x, w.gate_up, None, dtype)
        if isinstance(w.down, Plain):
            inner = gated_activation(*both.chunk(2, 1), activation=activation)
            return self.product(inner, w.down, None)
        rows = self.quantized(both, w.down, gated=activation)
        return self.multiply(rows, w.down, None, dtype)


def decoded(w: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K]."""
    if isinstance(w, Plain):
        return w.weight
    if isinstance(w, Float8):
        return (w.codes.float() * w.scales[:, None]).to(dtype)
    n, k = w.shape
    y = torch.empty((n, k), dtype=dtype, device=w.codes.device)
    chunks = 512 // w.width
    unpack_int4[(-(-n // 4), -(-k // (2 * w.width * chunks)))](
        w.codes, w.scales.view(torch.int32), w.offsets, y, n, k, WIDTH=w.width, ROWS=4,
        CHUNKS=chunks,
    )  # fmt: skip
    return y


def linear(x: torch.Tensor, w: StreamedLinear, *, products: Products) -> torch.Tensor:
    return products.product(x, w.matrix, w.bias)


def qkv_linear(
    x: torch.Tensor, w: StreamedQkv, *, products: Products
) -> tuple[torch.Tensor, ...]:
    return _split(products.product(x, w.matrix, w.bias), w)


def _split(y: torch.Tensor, w: StreamedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    return y.split_with_sizes((y.shape[1] - 2 * keys, keys, keys), 1)


def gated_mlp(
    x: torch.Tensor, w: StreamedMlp, *, activation: str, products: Products
) -> torch.Tensor:
    if products.decodes(x, w.gate_up):
        gate, up = products.product(x, w.gate_up, None).chunk(2, 1)
        inner = gated_activation(gate, up, activation=activation)
        return products.product(inner, w.down, None)
    rows = products.quantized(x, w.gate_up)
    return products.mlp(rows, w, x.dtype, activation)


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StreamedQkv, *,
    eps: float, products: Products,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    summed, rows = products.normed(residual, delta, norm, eps, w.matrix)
    y = products.multiply(rows, w.matrix, w.bias, residual.dtype)
    return summed, *_split(y, w)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StreamedMlp, *,
    eps: float, activation: str, products: Products,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    summed, rows = products.normed(residual, delta, norm, eps, w.gate_up)
    return summed, products.mlp(rows, w, residual.dtype, activation)


def attend_project(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, w: StreamedLinear, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    products: Products, name: str,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    out = decode_attention(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group, tuning=products.tuning, label=f"attend_project/{name}",
    )  # fmt: skip
    return products.product(out.view(q.shape[0], -1), w.matrix, w.bias), cache


def refuse(x: Any, *_: Any, **__: Any) -> str | None:
    """Refuse unsupported dtypes."""
    return refuse_dtype(x)


def _refuse_mlp(x: Any, *_: Any, activation: str, **__: Any) -> str | None:
    return refuse_activation(activation) or refuse(x)


def _refuse_norm(residual: Any, *_: Any, layout: str, **__: Any) -> str | None:
    """Refuse rows that multiply decoded weights."""
    rows, most = residual.shape[0], MAX_STREAMED[layout]
    if str(residual.dtype).endswith("float32"):
        return f"takes bfloat16 and float16, found {residual.dtype}"
    if layout == INT4_CHUNKS and rows > most:
        return f"takes {most} rows at most, found {rows}: the library is faster"
    return refuse(residual)


def _refuse_norm_mlp(
    residual: Any, *_: Any, activation: str, layout: str, **__: Any
) -> str | None:
    reason = _refuse_norm(residual, layout=layout)
    return reason or _refuse_mlp(residual, activation=activation)


def float8_kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels for weights that are stored in E4M3."""
    return _kernels(
        "triton_float8", FLOAT8_ROWS, weights.refuse_float8, Products(tuning)
    )


def int4_kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels for weights that are stored in 4 bits."""
    return _kernels("triton_int4", INT4_CHUNKS, weights.refuse_int4, Products(tuning))


def _kernels(
    name: str, layout: str, refuse_stored: weights.Refuse, products: Products
) -> Iterable[Kernel]:
    groups = packers(layout, refuse_stored)

    def kernel(
        op: str, run: Callable[..., Any], refuse: Callable[..., Any], group: str = "",
        **more: Any,
    ) -> Kernel:  # fmt: skip
        pack, can_pack = groups[group or op]
        return Kernel(
            op,
            name,
            partial(run, products=products),
            refuse=refuse,
            layout=layout,
            pack=pack,
            can_pack=can_pack,
            activation_quant=FLOAT8,
            preference=PREFERENCE + 2,
            **more,
        )

    yield kernel("linear", linear, refuse)
    yield kernel("qkv_linear", qkv_linear, refuse)
    yield kernel("gated_mlp", gated_mlp, _refuse_mlp)
    refuse_norm = partial(_refuse_norm, layout=layout)
    yield kernel("norm_qkv", norm_qkv, refuse_norm, "qkv_linear")
    refuse_norm = partial(_refuse_norm_mlp, layout=layout)
    yield kernel("norm_mlp", norm_mlp, refuse_norm, "gated_mlp")
    attend = partial(refuse_attend, tuning=products.tuning)
    run = partial(attend_project, name=name)
    yield kernel("attend_project", run, attend, "linear", plan=plan)
