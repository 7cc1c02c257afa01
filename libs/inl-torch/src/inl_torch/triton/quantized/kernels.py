"""Triton kernels of products with packed weights of one row of activations.

See :mod:`inl_torch.triton.quantized.packed` for the format. 4-bit codes are converted
to float32 by inserting them into the mantissa of 1.0; the 1 is then subtracted from
each value or from the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.target_info import is_cuda

from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.pdl import pdl_sync

BYTES = tl.constexpr(16)
"""Bytes of codes in a *unit*: 32 codes of 4 bits or 16 codes of 8 bits."""


def _unpack_ptx(first: int) -> str:
    """PTX that inserts four bits of each byte into the top of a float's mantissa."""
    text = "{ .reg .b32 w;"
    for byte in range(4):
        by = 19 - 8 * byte - first
        text += f" {'shl' if by > 0 else 'shr'}.b32 w, $4, {abs(by)};"
        text += f" lop3.b32 ${byte}, w, 0x780000, 0x3F800000, 0xEA;"
    return text + " }"


LOW, HIGH = tl.constexpr(_unpack_ptx(0)), tl.constexpr(_unpack_ptx(4))


@triton.jit
def unpack_int4(b: tensor) -> tuple[tensor, tensor]:
    """Convert low and high codes to float32 ``1 + code / 16``."""
    if is_cuda():
        low = tl.inline_asm_elementwise(
            LOW, "=r,=r,=r,=r,r", [b], dtype=tl.int32, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            HIGH, "=r,=r,=r,=r,r", [b], dtype=tl.int32, is_pure=True, pack=4
        )
    else:
        low = ((b.to(tl.int32) & 15) << 19) | 0x3F800000
        high = ((b.to(tl.int32) & 240) << 15) | 0x3F800000
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def unpack_8bit(b: tensor, FLOAT: tl.constexpr) -> tensor:
    """Convert 8-bit codes (int8 or float8 e4m3) to float32."""
    if FLOAT:
        wide = b.to(tl.int32)
        bits = ((wide & 128) << 24) | ((wide & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return b.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def unpack_codes(
    b: tensor, BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr
) -> tuple[tensor, tensor]:
    """Convert codes to float32: the low and the high ones, or all 8-bit codes twice."""
    if BITS == 4:
        low, high = unpack_int4(b)
        return low * 16 - (16 + ZERO), high * 16 - (16 + ZERO)
    values = unpack_8bit(b, FLOAT)
    return values, values


@triton.jit
def load_codes(
    codes: tensor, rows: tensor, units: tensor, N: tl.constexpr,
    ROW_UNITS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load codes as bytes [rows, units, 16], 0 out of bounds."""
    at = rows[:, None, None] * (ROW_UNITS * BYTES) + units[None, :, None] * BYTES
    mask = ((rows < N)[:, None] & (units < ROW_UNITS)[None, :])[:, :, None]
    return tl.load(codes + at + tl.arange(0, BYTES)[None, None, :], mask=mask, other=0)


@triton.jit
def load_scales(
    scales: tensor, rows: tensor, units: tensor, N: tl.constexpr,
    ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load scales [rows, units], 0 out of bounds."""
    mask = (rows < N)[:, None] & (units < ROW_UNITS)[None, :]
    at = rows[:, None] * GROUPS + (units // (ROW_UNITS // GROUPS))[None, :]
    return tl.load(scales + at, mask=mask, other=0)


@triton.jit
def load_inputs(
    x: tensor, units: tensor, shift: tl.constexpr, ROW_UNITS: tl.constexpr,
    PER_UNIT: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load the inputs [units, 16] of one row for the low or the high codes."""
    at = units[:, None] * PER_UNIT + shift + tl.arange(0, BYTES)[None, :]
    return tl.load(x + at, mask=(units < ROW_UNITS)[:, None], other=0).to(tl.float32)


@triton.jit
def unit_dot(
    b: tensor, scale: tensor, offset: tensor, low: tensor, high: tensor,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
) -> tensor:  # fmt: skip
    """Partial dot product of each unit: float32 [rows, units].

    Unless EXACT, the constant in converted 4-bit codes is subtracted from each sum, not
    from each value.
    """
    scale = scale.to(tl.float32)
    OFF_BY_16: tl.constexpr = BITS == 4 and not EXACT
    if OFF_BY_16:
        first, second = unpack_int4(b)
    else:
        first, second = unpack_codes(b, BITS, FLOAT, ZERO)
    dot = tl.sum(first * low[None, :, :], 2)
    if BITS == 4:
        dot += tl.sum(second * high[None, :, :], 2)
    product = scale * (dot * 16 if OFF_BY_16 else dot)
    if OFFSET or OFF_BY_16:
        input_sum = tl.sum(low, 1)
        if BITS == 4:
            input_sum = tl.sum(low + high, 1)
        shift = -(16 + ZERO) * scale if OFF_BY_16 else tl.zeros_like(scale)
        if OFFSET:
            shift += offset.to(tl.float32)
        product += shift * input_sum[None, :]
    return product


@triton.jit
def packed_row(
    x: tensor, delta: tensor, samples: tensor, norm_weight: tensor, codes: tensor,
    scales: tensor, offsets: tensor, bias: tensor, summed: tensor, y: tensor,
    x_stride: tensor, delta_stride: tensor, eps: tensor, N: tl.constexpr,
    ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, NORMED: tl.constexpr,
    GATHERS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Product of one row; if NORMED, of the norm of a sum, scaled after the product.

    N: rows of the result; if GATED, the matrix has 2 * N rows, gate and up.
    """
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    K: tl.constexpr = ROW_UNITS * PER_UNIT
    TWO_N: tl.constexpr = 2 * N
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    # Rows out of bounds stay out of bounds of the second half.
    up_rows = tl.where(rows < N, rows + N, 2 * N)
    units = tl.arange(0, UNITS)
    b = load_codes(codes, rows, units, N, ROW_UNITS)
    if GATED:
        c = load_codes(codes, up_rows, units, TWO_N, ROW_UNITS)
    pdl_sync(PDL)
    token = tl.program_id(1).to(tl.int64)
    source = token
    if GATHERS:
        source = tl.load(samples + token).to(tl.int64)
    acc = tl.zeros((ROWS, UNITS), tl.float32)
    up_acc = tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((UNITS,), tl.float32)
    for start in range(0, ROW_UNITS, UNITS):
        units = start + tl.arange(0, UNITS)
        low = load_inputs(x + source * x_stride, units, 0, ROW_UNITS, PER_UNIT)
        high = low
        if BITS == 4:
            high = load_inputs(x + source * x_stride, units, BYTES, ROW_UNITS, PER_UNIT)
        if NORMED:
            update = delta + source * delta_stride
            low += load_inputs(update, units, 0, ROW_UNITS, PER_UNIT)
            squares += tl.sum(low * low, 1)
            at = units[:, None] * PER_UNIT + tl.arange(0, BYTES)[None, :]
            first = (units < ROW_UNITS)[:, None] & (tl.program_id(0) == 0)
            if not GATHERS:
                tl.store(summed + token * K + at, low, mask=first)
            low *= load_inputs(norm_weight, units, 0, ROW_UNITS, PER_UNIT)
            if BITS == 4:
                high += load_inputs(update, units, BYTES, ROW_UNITS, PER_UNIT)
                squares += tl.sum(high * high, 1)
                if not GATHERS:
                    tl.store(summed + token * K + at + BYTES, high, mask=first)
                high *= load_inputs(norm_weight, units, BYTES, ROW_UNITS, PER_UNIT)
        scale = load_scales(scales, rows, units, N, ROW_UNITS, GROUPS)
        offset = scale
        if OFFSET:
            offset = load_scales(offsets, rows, units, N, ROW_UNITS, GROUPS)
        acc += unit_dot(b, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT)
        if GATED:
            scale = load_scales(scales, up_rows, units, TWO_N, ROW_UNITS, GROUPS)
            if OFFSET:
                offset = load_scales(offsets, up_rows, units, TWO_N, ROW_UNITS, GROUPS)
            up_acc += unit_dot(
                c, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT
            )
        if start + UNITS < ROW_UNITS:
            b = load_codes(codes, rows, units + UNITS, N, ROW_UNITS)
            if GATED:
                c = load_codes(codes, up_rows, units + UNITS, TWO_N, ROW_UNITS)
    result = tl.sum(acc, 1)
    up = tl.sum(up_acc, 1)
    if NORMED:
        norm_scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result *= norm_scale
        up *= norm_scale
    if GATED:
        result = activate_gate(result, up, SILU)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=rows < N)


@triton.jit
def dequantize(
    codes: tensor, scales: tensor, offsets: tensor, rows: tensor, units: tensor,
    N: tl.constexpr, ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Dequantize to float32 [rows, units, 16]: weights of low and of high codes."""
    b = load_codes(codes, rows, units, N, ROW_UNITS)
    scale = load_scales(scales, rows, units, N, ROW_UNITS, GROUPS).to(tl.float32)
    low, high = unpack_codes(b, BITS, FLOAT, ZERO)
    low *= scale[:, :, None]
    high *= scale[:, :, None]
    if OFFSET:
        offset = load_scales(offsets, rows, units, N, ROW_UNITS, GROUPS).to(tl.float32)
        low += offset[:, :, None]
        high += offset[:, :, None]
    return low, high


@triton.jit
def unpack(
    codes: tensor, scales: tensor, offsets: tensor, y: tensor, N: tl.constexpr,
    ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:  # fmt: skip
    """Store dequantized weights."""
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    low, high = dequantize(
        codes,
        scales,
        offsets,
        rows,
        units,
        N,
        ROW_UNITS,
        GROUPS,
        BITS,
        FLOAT,
        ZERO,
        OFFSET,
    )
    row_offset = rows[:, None] * (ROW_UNITS * PER_UNIT) + units[None, :] * PER_UNIT
    at = row_offset[:, :, None] + tl.arange(0, BYTES)[None, None, :]
    mask = ((rows < N)[:, None] & (units < ROW_UNITS)[None, :])[:, :, None]
    tl.store(y + at, low, mask=mask)
    if BITS == 4:
        tl.store(y + at + BYTES, high, mask=mask)
