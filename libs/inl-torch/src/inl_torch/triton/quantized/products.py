"""Ops over packed weights; for many rows the weights are dequantized first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.launches import Launch
from inl_torch.triton.matmul.activation import gated_activation, refuse_activation
from inl_torch.triton.matmul.stored import is_decoded
from inl_torch.triton.quantized import packed
from inl_torch.triton.quantized.kernels import packed_row, unpack
from inl_torch.triton.quantized.packed import (
    FLOAT8,
    PACKED,
    UNIT_BYTES,
    Packed,
)
from inl_torch.triton.quantized.tiles import packed_rows
from inl_torch.triton.tuning import Tuning

NAME, MIXED = "triton_packed", "triton+eager_packed"
"""Names of the kernels without, and with products of the library."""

Product = Callable[..., torch.Tensor]
"""One of :func:`multiply` and :func:`fastest`."""

MAX_SINGLE_ROWS = 8
"""Most float32 rows, each of which reads the packed weights."""

MAX_ROWS = 32
"""Most half-precision rows for which weights are dequantized inside the product; for
more rows it is faster to store the dequantized weights first."""


class RowTile(NamedTuple):
    """Launch parameters of the product of one row: rows and 16-byte units per tile."""

    rows: int
    units: int
    warps: int
    stages: int = 1


def row_tile(n: int, row_units: int, tuning: Tuning) -> RowTile:
    """Return the tile for one row."""
    units = min(power(row_units), 128)
    max_rows = max(1024 // units, 1)
    rows = min(max(power(n // (8 * tuning.processors)), 1), max_rows, 8)
    return RowTile(rows, units, 4 if rows * units >= 256 else 2)


class MultiRowTile(NamedTuple):
    """Launch parameters of the product of a few rows."""

    tokens: int
    rows: int
    slots: int
    """Slots of each row per tile, one per warp."""
    slot_scales: int
    """Scales per slot, 1 or 2."""
    stages: int


def multi_row_tile(w: Packed, tokens: int, tuning: Tuning) -> MultiRowTile:
    """Return the tile for a few rows."""
    n, row_units = w.codes.shape
    assert w.scales is not None
    groups = w.scales.shape[1]
    slot_scales = 2 if groups > 1 and row_units // groups % (2 * UNIT_BYTES) else 1
    # The matrix units of every chip support 16 columns, but not fewer.
    tokens = min(max(power(tokens), 16 // slot_scales), MAX_ROWS)
    waves = n // (64 * tuning.processors)
    rows = (16, 32)[waves] if waves < 2 else 64 if tokens < MAX_ROWS else 32
    return MultiRowTile(tokens, rows, 4, slot_scales, {8: 4, 16: 3}.get(tokens, 2))


def format_constants(w: Packed) -> dict[str, Any]:
    """Compile-time constants of the kernels for the format of ``w``."""
    assert w.scales is not None
    is_4bit = w.codes.dtype == torch.uint8
    return {
        "ROW_UNITS": w.codes.shape[1] // UNIT_BYTES,
        "GROUPS": w.scales.shape[1],
        "BITS": 4 if is_4bit else 8,
        "FLOAT": w.codes.dtype == FLOAT8,
        "ZERO": 8.0 if is_4bit and w.offsets is None else 0.0,
        "OFFSET": w.offsets is not None,
    }


def kernel_tensors(w: Packed) -> tuple[Any, Any, Any]:
    """Return the codes as bytes, the scales, and the offsets or a placeholder."""
    codes = w.codes.view(torch.uint8)
    return codes, w.scales, w.scales if w.offsets is None else w.offsets


def dequantized(w: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weights [N, K]."""
    if w.scales is None:
        return w.codes
    (n, k), constants = w.shape, format_constants(w)
    y = torch.empty((n, k), dtype=dtype, device=w.codes.device)
    units = min(power(constants["ROW_UNITS"]), 64)
    rows = 512 // units
    unpack[(-(-n // rows), -(-constants["ROW_UNITS"] // units))](
        *kernel_tensors(w), y, N=n, ROWS=rows, UNITS=units, num_warps=4, **constants
    )
    return y


def is_own(rows: int, dtype: Any, *matrices: Any) -> bool:
    """Whether the kernels multiply rows with matrices, of which none is decoded."""
    max_rows = MAX_SINGLE_ROWS if str(dtype).endswith("float32") else MAX_ROWS
    return rows <= max_rows and not any(map(is_decoded, matrices))


def fastest(
    x: torch.Tensor, w: Packed, bias: torch.Tensor | None, tuning: Tuning
) -> torch.Tensor:
    """Compute :func:`multiply`, of many rows by the library with decoded weights."""
    if w.scales is None or not is_own(len(x), x.dtype):
        return library_product(x, dequantized(w, x.dtype), bias)
    return multiply(x, w, bias, tuning)


@lru_cache(maxsize=1024)
def _planned(
    tokens: int, inputs: int, outputs: int, groups: int, dtype: torch.dtype,
    has_bias: bool, processors: int,
) -> Launch:  # fmt: skip
    """Return the launch of :func:`multiply_stored`."""
    tuning = Tuning(processors=processors)
    is_4bit = dtype == torch.uint8
    columns = inputs // 2 if is_4bit else inputs
    # Of tensors on the device "meta" only shapes and dtypes are read.
    empty = partial(torch.empty, device="meta")
    w = Packed(empty(outputs, columns, dtype=dtype), empty(outputs, groups))
    constants = format_constants(w)
    if tokens == 1:
        tile = row_tile(outputs, constants["ROW_UNITS"], tuning)
        return Launch(
            packed_row, (-(-outputs // tile.rows), 1), N=outputs, NORMED=False,
            GATHERS=False, HAS_BIAS=has_bias, GATED=False, SILU=False, ROWS=tile.rows,
            UNITS=tile.units, PDL=False, num_warps=tile.warps, **constants,
        )  # fmt: skip
    many = multi_row_tile(w, tokens, tuning)
    return Launch(
        packed_rows, (-(-outputs // many.rows), -(-tokens // many.tokens)), N=outputs,
        HAS_BIAS=has_bias, TOKENS=many.tokens, ROWS=many.rows, SLOTS=many.slots,
        PARTS=many.slot_scales, STAGES=many.stages, num_warps=many.slots, **constants,
    )  # fmt: skip


def multiply_stored(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    """Compute :func:`multiply` of any rows of a half type, in one launch.

    codes, scales: as of :class:`Packed`, of float32 scales and no offsets. Of many
    rows, each block of :data:`MAX_ROWS` decodes the weights again.
    """
    x = x if x.is_contiguous() else x.contiguous()
    (tokens, inputs), outputs = x.shape, codes.shape[0]
    launch = _planned(
        tokens, inputs, outputs, scales.shape[1], codes.dtype, bias is not None,
        tuning.processors,
    )  # fmt: skip
    y = x.new_empty(tokens, outputs)
    # Triton has no type of float8 for the bytes that the kernels read.
    stored = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    given = y if bias is None else bias
    if tokens == 1:
        launch(x, x, y, x, stored, scales, scales, given, y, y, inputs, inputs, 0.0)
    else:
        launch(x, stored, scales, scales, given, y, inputs, tokens)
    return y


def multiply(
    x: torch.Tensor, w: Packed, bias: torch.Tensor | None, tuning: Tuning
) -> torch.Tensor:
    """Return ``x`` [T, K] times the transpose of the matrix [N, K]: [T, N]."""
    if len(x) > 1 and x.dtype != torch.float32:
        return _multi_row_product(dense(x), w, bias, tuning)
    return row_product(x, w, bias, tuning)[1]


def _multi_row_product(
    x: torch.Tensor, w: Packed, bias: torch.Tensor | None, tuning: Tuning
) -> torch.Tensor:
    tokens, (n, _), constants = x.shape[0], w.shape, format_constants(w)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    tile = multi_row_tile(w, tokens, tuning)
    packed_rows[(-(-n // tile.rows),)](
        x, *kernel_tensors(w), y if bias is None else bias, y, x.stride(0), tokens, N=n,
        HAS_BIAS=bias is not None, TOKENS=tile.tokens, ROWS=tile.rows, SLOTS=tile.slots,
        PARTS=tile.slot_scales, STAGES=tile.stages, num_warps=tile.slots, **constants,
    )  # fmt: skip
    return y


def row_product(
    x: torch.Tensor,
    w: Packed,
    bias: torch.Tensor | None,
    tuning: Tuning,
    *,
    delta: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    norm: Norm | None = None,
    eps: float = 0.0,
    gated: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + delta`` [T, K], and the product [S, N] of its norm.

    Without ``norm``, the product is that of ``x``, and the first result is undefined.
    """
    constants, k = format_constants(w), w.shape[1]
    n = w.shape[0] // (2 if gated else 1)
    x = dense(x)
    delta = x if delta is None else dense(delta)
    tokens = x.shape[0] if samples is None else samples.shape[0]
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    adds = norm is not None and samples is None
    summed = torch.empty((tokens, k), dtype=x.dtype, device=x.device) if adds else y
    tile = row_tile(n, constants["ROW_UNITS"], tuning)
    packed_row[(-(-n // tile.rows), tokens)](
        x, delta, y if samples is None else samples, x if norm is None else norm.weight,
        *kernel_tensors(w), y if bias is None else bias, summed, y, x.stride(0),
        delta.stride(0), eps, N=n, NORMED=norm is not None, GATHERS=samples is not None,
        HAS_BIAS=bias is not None, GATED=bool(gated), SILU=gated == "silu",
        ROWS=tile.rows, UNITS=tile.units, PDL=tuning.uses_pdl(tokens),
        num_warps=tile.warps, **constants, **tuning.launch(tokens),
    )  # fmt: skip
    return summed, y


def linear(
    x: torch.Tensor, w: Linear, *, tuning: Tuning, product: Product
) -> torch.Tensor:
    return product(x, w.weight, w.bias, tuning)


def qkv_linear(
    x: torch.Tensor, w: StackedQkv, *, tuning: Tuning, product: Product
) -> tuple[torch.Tensor, ...]:
    return _split(product(x, w.weight, w.bias, tuning), w)


def _split(y: torch.Tensor, w: StackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    return y.split_with_sizes((y.shape[1] - 2 * keys, keys, keys), 1)


def gated_mlp(
    x: torch.Tensor, w: StackedMlp, *, activation: str, tuning: Tuning, product: Product
) -> torch.Tensor:
    if x.shape[0] == 1 and w.gate_up.scales is not None:
        inner = row_product(x, w.gate_up, None, tuning, gated=activation)[1]
    else:
        gate, up = product(x, w.gate_up, None, tuning).chunk(2, 1)
        inner = gated_activation(gate, up, activation=activation)
    return product(inner, w.down, None, tuning)


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedQkv, *,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    summed, y = row_product(
        residual, w.weight, w.bias, tuning, delta=delta, norm=norm, eps=eps
    )
    return summed, *_split(y, w)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedMlp, *,
    eps: float, activation: str, tuning: Tuning, product: Product,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    summed, y = row_product(
        residual, w.gate_up, None, tuning, delta=delta, norm=norm, eps=eps,
        gated=activation,
    )  # fmt: skip
    return summed, product(y, w.down, None, tuning)


def norm_logits(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor, norm: Norm,
    w: Linear, *, eps: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return row_product(
        residual, w.weight, w.bias, tuning, delta=delta, samples=samples, norm=norm,
        eps=eps,
    )[1]  # fmt: skip


def refuse(x: Any, *_: Any, **attrs: Any) -> str | None:
    """Refuse unsupported dtypes and activations."""
    reason = refuse_dtype(x)
    if "activation" in attrs:
        reason = reason or refuse_activation(attrs["activation"])
    return reason


def refuse_rows(residual: Any, _delta: Any, *rest: Any, **attrs: Any) -> str | None:
    """Refuse more than one row: a separate norm is then better."""
    rows = rest[0].shape[0] if len(rest) > 2 else residual.shape[0]
    if rows > 1:
        return f"takes 1 row, found {rows}: a separate norm is faster"
    return refuse(residual, **attrs)


def refuse_decoded(*args: Any, other: Callable[..., str | None], **attrs: Any) -> Any:
    """Refuse calls some of whose products are the library's."""
    x, w = args[0], args[-1]
    if not is_own(x.shape[0], x.dtype, *_matrices(w)):
        return f"{x.shape[0]} rows: multiplying decoded weights is faster"
    return other(*args, **attrs)


def refuse_packed(*args: Any, other: Callable[..., str | None], **attrs: Any) -> Any:
    """Refuse calls none of whose products is the library's."""
    x, w = args[0], args[-1]
    if is_own(x.shape[0], x.dtype, *_matrices(w)):
        return f"{x.shape[0]} rows: no weights are decoded"
    return other(*args, **attrs)


def _matrices(w: Any) -> Iterable[Any]:
    fields = w._asdict().items() if w is not None else ()
    return [x for name, x in fields if x is not None and not name.endswith("bias")]


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels, which are preferred for weights that a file stores packed."""

    def kernel(
        op: str, name: str, run: Callable[..., Any], refuse: Callable[..., Any],
        group: str = "",
    ) -> Kernel:  # fmt: skip
        pack, can_pack = GROUPS[group or op]
        return Kernel(
            op,
            name,
            partial(run, tuning=tuning),
            refuse=refuse,
            layout=PACKED,
            pack=pack,
            can_pack=can_pack,
            preference=PREFERENCE + 1,
        )

    for name, product, own in (
        (NAME, multiply, refuse_decoded), (MIXED, fastest, refuse_packed),
    ):  # fmt: skip
        products: dict[str, Any] = {"product": product}
        any_rows, one_row = (partial(own, other=each) for each in (refuse, refuse_rows))
        yield kernel("linear", name, partial(linear, **products), any_rows)
        yield kernel("qkv_linear", name, partial(qkv_linear, **products), any_rows)
        yield kernel("gated_mlp", name, partial(gated_mlp, **products), any_rows)
        yield kernel(
            "norm_mlp", name, partial(norm_mlp, **products), one_row, "gated_mlp"
        )
    yield kernel("norm_qkv", NAME, norm_qkv, refuse_rows, "qkv_linear")
    yield kernel("norm_logits", NAME, norm_logits, refuse_rows, "linear")


GROUPS = {
    "linear": (packed.pack_linear, packed.can_pack),
    "qkv_linear": (packed.pack_qkv, packed.refuse_qkv),
    "gated_mlp": (packed.pack_mlp, packed.refuse_mlp),
}
"""Op -> functions that pack its weights, and that return why they cannot be."""
