"""Products with weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

import torch

from inl.dtypes import HostArray
from inl.ops.norm import Norm
from inl.spec.activation_quant import FLOAT8
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.common import dense, dtype_name, power, refuse_row
from inl_torch.triton.counters import Counters
from inl_torch.triton.float8.products import Products as Float8Products
from inl_torch.triton.float8.products import Rows, multiply, normed, quantized
from inl_torch.triton.float8.weights import FLOAT8 as E4M3
from inl_torch.triton.float8.weights import MULTIPLE, Float8
from inl_torch.triton.int4.kernels import (
    round_int4,
    streamed_int4,
    sum_groups,
    unpack_int4,
)
from inl_torch.triton.int4.rounded_kernels import rounded_int4
from inl_torch.triton.int4.weights import (
    INT4_CHUNKS,
    Int4,
    refuse_int4,
    stacked_int4,
)
from inl_torch.triton.matmul.activation import gated_activation
from inl_torch.triton.matmul.stored import Matrix, Plain
from inl_torch.triton.matmul.stored_kernels import MatrixSize, sizes, stored_kernels
from inl_torch.triton.norm import norm_and_sums
from inl_torch.triton.tuning import Tuning

MAX_STREAMED: Final = 128
"""Most rows that stream a matrix. For more, it is decoded for the device's library."""

LEAST_ROUNDED: Final = 1024
"""Least rows and columns of a matrix whose decoded weights are rounded, for many rows
of activations."""

LEAST_COPIED: Final = 33
"""Fewest rows that multiply the copy of a matrix in E4M3, which is twice its bytes."""

MOST_EXACT: Final = 32
"""Most rows that multiply wide groups without being rounded: for more, rounding takes
less time than the conversion of codes."""

TOKENS: Final = 64
"""Most rows of one program."""

LARGE_TILE_BYTES: Final = 200 << 10
"""Shared memory of tiles of 128 rows."""

LEAST_GROUPS: Final = 16
"""Least width of a product of float32 on the matrix units."""

MOST_GROUPS: Final = 32
"""Most groups whose offsets the registers of a program hold."""

ROWS: Final = 4
"""Rows of a matrix that a program decodes."""

DECODED: Final = 512
"""Bytes of each that it decodes at once."""

COMPILING: Final = Lock()
"""Held by a thread that may compile the kernel which rounds weights."""


class Summed(NamedTuple):
    """Activations in half precision, and the sums of their groups."""

    x: torch.Tensor
    """[T, K]."""
    sums: torch.Tensor
    """[T, groups], float32."""


class StreamTile(NamedTuple):
    """Launch parameters of a streamed product; measured on an H200 (Triton 3.6)."""

    rows: int
    """Rows of the matrix per program."""
    splits: int
    """Programs that share the columns of a tile."""
    warps: int
    stages: int

    def groups(self, count: int) -> int:
        """Return the groups of ``count`` whose offsets are multiplied at once."""
        return min(max(power(-(-count // self.splits)), LEAST_GROUPS), MOST_GROUPS)


def stream_tile(
    n: int, chunks: int, tokens: int, tuning: Tuning, *, gated: bool
) -> StreamTile:
    """Return the tile for a matrix [n, k] of ``chunks``, and padded ``tokens``.

    Two warps use the matrix units that read weights from registers; four that have 64
    rows, those of groups of warps.
    """
    rows, warps, per_processor = {8: (64, 2, 3), 16: (32, 2, 4), 32: (64, 4, 3)}[tokens]
    if gated:
        return StreamTile(rows, 1, warps, 3)
    most = per_processor * tuning.processors // -(-n // rows)
    # A power of two, of at least two steps of the pipeline each.
    splits = 1 << max(min(most, chunks // 2, 8).bit_length() - 1, 0)
    return StreamTile(rows, splits, warps, 3)


def rounded_tile(n: int, k: int, width: int, tokens: int, tuning: Tuning) -> StreamTile:
    """Return the tile for a matrix [n, k] that ``tokens`` rows in float8 multiply.

    Tiles of many rows are large, so that weights are converted less often.
    """
    repeats, programs = -(-tokens // TOKENS), (3 if tokens <= 16 else 2)
    rows, warps = 64, 4
    if repeats > 1 and tuning.shared_bytes >= LARGE_TILE_BYTES:
        rows, warps, programs = 128, 8, 1
    tiles = -(-n // rows) * repeats
    splits = max(programs * tuning.processors // tiles, 1)
    return StreamTile(rows, min(splits, max(k // (4 * width), 1), 8), warps, 3)


class Products:
    """Products with matrices of 4 bits, and the counters of one engine's kernels.

    For a few rows, wide groups are converted to the compute dtype. Other rows are
    rounded to E4M3, which codes of 4 bits are as they are. For many rows, the device's
    library multiplies decoded weights: those of large matrices are rounded to E4M3,
    too. Matrices that have a copy in E4M3 are decoded for no rows.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._counters = Counters()
        self._float8 = Float8Products(tuning)

    def product(
        self, x: torch.Tensor, w: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N]: [T, N].

        Rows in float32, and many rows, multiply decoded weights.
        """
        if isinstance(w, Plain):
            return library_product(x, w.weight, bias)
        assert isinstance(w, Int4), "of no other layout"
        if (copy := copy_for(x, w)) is not None:
            return self._float8.product(x, copy, bias)
        if self.decodes(x):
            if is_rounded(x, w.shape):
                rows = quantized(x, self.tuning)
                return multiply(rows, rounded(w), bias, x.dtype)
            return library_product(x, decoded(w, x.dtype), bias)
        if is_exact(x, w):
            return self._stream(self._summed(x, w), w, bias)
        return self._round(quantized(x, self.tuning, group=w.width), w, bias, x.dtype)

    def decodes(self, x: torch.Tensor) -> bool:
        """Whether rows [T, K] multiply decoded weights."""
        return len(x) > MAX_STREAMED or x.dtype == torch.float32

    def norm_product(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Int4, bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the product of its norm: [T, N]."""
        added, tuning = (residual, delta, norm, eps), self.tuning
        if (copy := copy_for(residual, w)) is not None:
            return self._float8.norm_product(*added, copy, bias)
        if self.decodes(residual):
            summed, rows = normed(*added, tuning)
            return summed, multiply(rows, rounded(w), bias, residual.dtype)
        if is_exact(residual, w):
            summed, *wide = norm_and_sums(*added, w.width, tuning)
            return summed, self._stream(Summed(*wide), w, bias)
        summed, rows = normed(*added, tuning, group=w.width)
        return summed, self._round(rows, w, bias, residual.dtype)

    def mlp(self, x: torch.Tensor, w: StackedMlp, activation: str) -> torch.Tensor:
        """Return the feed-forward layer of ``x`` [T, K]."""
        if (copies := copies_for(x, w)) is not None:
            return self._float8.mlp(x, copies, activation)
        gate_up = _int4(w)
        if is_exact(x, gate_up) and not self.decodes(x):
            rows = self._summed(x, gate_up)
            inner = self._stream(rows, gate_up, None, activation)
            return self.product(inner, w.down, None)
        return self._gated(self.product(x, gate_up, None), w, activation)

    def norm_mlp(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: StackedMlp, activation: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the layer of its norm."""
        if (copies := copies_for(residual, w)) is not None:
            added = residual, delta, norm, eps
            return self._float8.norm_mlp(*added, copies, activation)
        gate_up = _int4(w)
        if is_exact(residual, gate_up):
            width, tuning = gate_up.width, self.tuning
            summed, *rows = norm_and_sums(residual, delta, norm, eps, width, tuning)
            inner = self._stream(Summed(*rows), gate_up, None, activation)
            return summed, self.product(inner, w.down, None)
        summed, both = self.norm_product(residual, delta, norm, eps, gate_up, None)
        return summed, self._gated(both, w, activation)

    def _gated(
        self, both: torch.Tensor, w: StackedMlp, activation: str
    ) -> torch.Tensor:
        """Return the layer of the products with gate and up [T, 2 * I]."""
        down, is_few = w.down, not self.decodes(both)
        copy = copy_for(both, down)
        if copy is not None:
            rows = quantized(both, self.tuning, gated=activation)
            return self._float8.multiply(rows, copy, None, both.dtype)
        if isinstance(down, Int4) and is_few and not is_exact(both, down):
            rows = quantized(both, self.tuning, gated=activation, group=down.width)
            return self._round(rows, down, None, both.dtype)
        if isinstance(down, Int4) and not is_few and is_rounded(both, down.shape):
            rows = quantized(both, self.tuning, gated=activation)
            return multiply(rows, rounded(down), None, both.dtype)
        inner = gated_activation(*both.chunk(2, 1), activation=activation)
        return self.product(inner, down, None)

    def technologies(
        self, x: Any, matrix: MatrixSize, down: MatrixSize | None = None
    ) -> set[str]:
        """Return what computes a product, or a feed-forward layer."""
        is_few = x.shape[0] <= MAX_STREAMED and dtype_name(x) != "float32"
        both = (matrix,) if down is None else (matrix, down)
        found = {"triton"} if is_few else {"triton", "eager"}
        if not any(size.is_decoded for size in both):
            return found
        return {"eager"} if down is None else found | {"eager"}

    def refuse_norm(self, residual: Any, matrix: MatrixSize) -> str | None:
        """Refuse rows that multiply decoded weights which are not rounded."""
        rows = residual.shape[0]
        if str(residual.dtype).endswith("float32"):
            return f"takes bfloat16 and float16, found {residual.dtype}"
        if rows > MAX_STREAMED and not is_rounded(residual, matrix[:2]):
            most = MAX_STREAMED
            return f"takes {most} rows at most, found {rows}: the library is faster"
        return refuse_row(residual, residual.shape[1])

    def _summed(self, x: torch.Tensor, w: Int4) -> Summed:
        x, width = dense(x), w.width
        tokens, groups = x.shape[0], x.shape[1] // width
        sums = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
        tile = min(power(groups), 4096 // width)
        sum_groups[(tokens, -(-groups // tile))](
            x, sums, x.stride(0), groups, WIDTH=width, GROUPS=tile,
            PDL=self.tuning.uses_pdl(tokens), **self.tuning.launch(tokens),
        )  # fmt: skip
        return Summed(x, sums)

    def _stream(
        self, rows: Summed, w: Int4, bias: torch.Tensor | None, gated: str = ""
    ) -> torch.Tensor:
        x, sums = rows
        (tokens, k), n = x.shape, w.shape[0] // (2 if gated else 1)
        tuning, width = self.tuning, w.width
        padded = max(power(tokens), 8)
        tile = stream_tile(n, k // (2 * width), padded, tuning, gated=bool(gated))
        tiles = -(-n // tile.rows)
        y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
        streamed_int4[(tiles, tile.splits)](
            x, sums, w.codes, w.scales, w.offsets, w.scales if bias is None else bias,
            y,
            *self._parts(y, tiles, tile.splits), tokens, n, k, x.stride(0),
            TOKENS=padded, ROWS=tile.rows, SPLITS=tile.splits, STAGES=tile.stages,
            HAS_BIAS=bias is not None, GATED=bool(gated), SILU=gated == "silu",
            PDL=tuning.uses_pdl(tokens), WIDTH=width, GROUPS=tile.groups(k // width),
            num_warps=tile.warps, **tuning.launch(tokens),
        )  # fmt: skip
        return y

    def _round(
        self, x: Rows, w: Int4, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        (tokens, k), n, tuning = x.codes.shape, w.shape[0], self.tuning
        padded = min(max(power(tokens), 16), TOKENS)
        tile = rounded_tile(n, k, w.width, tokens, tuning)
        tiles, repeats = -(-n // tile.rows), -(-tokens // padded)
        y = torch.empty((tokens, n), dtype=dtype, device=x.codes.device)
        rounded_int4[(repeats, tiles, tile.splits)](
            *x, w.codes, w.scales.view(torch.int32), w.offsets,
            w.scales if bias is None else bias, y,
            *self._parts(y, tiles * repeats, tile.splits), tokens, n, k, TOKENS=padded,
            ROWS=tile.rows, SPLITS=tile.splits, STAGES=tile.stages,
            EVEN=n % tile.rows == 0 and k % (4 * w.width) == 0,
            HAS_BIAS=bias is not None, PDL=tuning.uses_pdl(tokens), WIDTH=w.width,
            num_warps=tile.warps, **tuning.launch(tokens),
        )  # fmt: skip
        return y

    def _parts(
        self, y: torch.Tensor, tiles: int, splits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the parts of a result, and their counters."""
        if splits == 1:
            return y, y
        size = splits, *y.shape
        parts = torch.empty(size, dtype=torch.float32, device=y.device)
        return parts, self._counters.each(y.device, tiles, splits)


def is_exact(x: torch.Tensor, w: Int4) -> bool:
    """Whether rows [T, K] multiply a matrix without being rounded."""
    return w.is_wide and len(x) <= MOST_EXACT


def is_rounded(x: Any, shape: tuple[int, int]) -> bool:
    """Whether many rows like ``x`` multiply weights [N, K] that are rounded to E4M3.

    Rounding them loses about as much as rounding rows, which the tolerance of kernels
    that round rows permits; small models, whose logits change most, keep them exact.
    """
    return dtype_name(x) != "float32" and is_copied(shape)


def copy_for(x: torch.Tensor, w: Matrix) -> Float8 | None:
    """Return the copy in E4M3 that rows [T, K] multiply, or ``None``."""
    is_many = len(x) >= LEAST_COPIED and x.dtype != torch.float32
    return w.copy if is_many and isinstance(w, Int4) else None


def copies_for(x: torch.Tensor, w: StackedMlp) -> StackedMlp | None:
    """Return the layer of copies in E4M3 that rows [T, K] multiply, or ``None``."""
    gate_up, down = copy_for(x, w.gate_up), copy_for(x, w.down)
    if gate_up is None or (down is None and isinstance(w.down, Int4)):
        return None
    return StackedMlp(gate_up, w.down if down is None else down)


def _int4(w: StackedMlp) -> Int4:
    assert isinstance(w.gate_up, Int4), "gate and up are divided by rows"
    return w.gate_up


def decoded(w: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K]."""
    if isinstance(w, Plain):
        return w.weight
    assert isinstance(w, Int4), "of no other layout"
    n, k = w.shape
    y = torch.empty((n, k), dtype=dtype, device=w.codes.device)
    chunks = DECODED // w.width
    unpack_int4[(-(-n // ROWS), -(-k // (2 * w.width * chunks)))](
        w.codes, w.scales.view(torch.int32), w.offsets, y, n, k, WIDTH=w.width,
        ROWS=ROWS, CHUNKS=chunks,
    )  # fmt: skip
    return y


def rounded(w: Int4) -> Float8:
    """Return the weights [N, K] in E4M3, with a scale of each row."""
    n, k = w.shape
    place = w.codes.device
    codes = torch.empty((n, k), dtype=E4M3, device=place)
    scales = torch.empty(n, dtype=torch.float32, device=place)
    round_int4[(-(-n // ROWS),)](
        w.codes, w.scales, w.offsets, codes, scales, n, k, WIDTH=w.width, ROWS=ROWS,
        CHUNKS=DECODED // w.width, GROUPS=power(k // w.width), num_warps=4,
    )  # fmt: skip
    return Float8(codes, scales)


def copied_int4(arrays: Sequence[HostArray], backend: Any) -> Int4:
    """Pack matrices as one, by rows, with a copy in E4M3 if it is large."""
    w = stacked_int4(arrays, backend)
    if not is_copied(w.shape):
        return w
    # Threads that load weights have another current device.
    with COMPILING, torch.cuda.device_of(w.codes):  # type: ignore[no-untyped-call]
        return w._replace(copy=rounded(w))


def is_copied(shape: tuple[int, int]) -> bool:
    """Whether a matrix [N, K] of 4 bits may be rounded to E4M3."""
    return min(shape) >= LEAST_ROUNDED and shape[0] % MULTIPLE == 0


def copied_bytes(weights: Any) -> int:
    """Return the bytes of the copies of a group of weights.

    weights: specs of one rank's tensors, as the op's weights type.
    """
    if getattr(weights[0], "layout", "") != INT4_CHUNKS:
        return 0
    copied = [
        one for one in sizes(weights)
        if not one.is_decoded and is_copied((one.rows, one.columns))
    ]  # fmt: skip
    return sum(one.rows * (one.columns + 4) for one in copied)


def int4_kernels(
    tuning: Tuning, stack: Callable[..., Int4] = stacked_int4
) -> Iterable[Kernel]:
    """Return the kernels for weights that are stored in 4 bits.

    They declare that rows are rounded, although a few are not where groups are wide,
    which only the loaded scales show. stack: packs matrices; :func:`copied_int4` with
    copies.
    """
    return stored_kernels(
        "int4", ("triton", "triton+eager", "eager"), ("triton", "triton+eager"),
        INT4_CHUNKS, refuse_int4, stack, Products(tuning),
        activation_quant=FLOAT8,
    )  # fmt: skip
