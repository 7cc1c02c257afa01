"""Programs that multiply packed weights: see :mod:`inl_torch.triton.quantized.packed`.

Codes of 4 bits become float32 by their bits: they are laid into the fraction of 1, and
1 is taken off again, of each or of their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.target_info import is_cuda

from inl_torch.triton.matmul.activation import gated
from inl_torch.triton.pdl import follow

BYTES = tl.constexpr(16)
"""Bytes of codes that lie together, a *unit*: 32 codes of 4 bits or 16 of 8."""


def _shifted(first: int) -> str:
    """PTX that lays four bits of each byte into the top of a float's fraction."""
    text = "{ .reg .b32 w;"
    for byte in range(4):
        by = 19 - 8 * byte - first
        text += f" {'shl' if by > 0 else 'shr'}.b32 w, $4, {abs(by)};"
        text += f" lop3.b32 ${byte}, w, 0x780000, 0x3F800000, 0xEA;"
    return text + " }"


LOW, HIGH = tl.constexpr(_shifted(0)), tl.constexpr(_shifted(4))


@triton.jit
def sixteenths(b: tensor) -> tuple[tensor, tensor]:
    """Low and high codes of bytes as float32, 1 more than a sixteenth of each."""
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
def bytes_of(b: tensor, FLOAT: tl.constexpr) -> tensor:
    """Codes of 8 bits as float32."""
    if FLOAT:
        wide = b.to(tl.int32)
        bits = ((wide & 128) << 24) | ((wide & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return b.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def halves(
    b: tensor, BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr
) -> tuple[tensor, tensor]:
    """Codes of bytes as float32: the low and the high ones, or all of them twice."""
    if BITS == 4:
        low, high = sixteenths(b)
        return low * 16 - (16 + ZERO), high * 16 - (16 + ZERO)
    all_ = bytes_of(b, FLOAT)
    return all_, all_


@triton.jit
def load_codes(
    codes: tensor, rows: tensor, units: tensor, N: tl.constexpr, LINE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Bytes [rows, units, 16] of codes, zeros outside."""
    at = rows[:, None, None] * (LINE * BYTES) + units[None, :, None] * BYTES
    mask = ((rows < N)[:, None] & (units < LINE)[None, :])[:, :, None]
    return tl.load(codes + at + tl.arange(0, BYTES)[None, None, :], mask=mask, other=0)


@triton.jit
def load_scales(
    scales: tensor, rows: tensor, units: tensor, N: tl.constexpr, LINE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Scales [rows, units], zeros outside."""
    mask = (rows < N)[:, None] & (units < LINE)[None, :]
    at = rows[:, None] * GROUPS + (units // (LINE // GROUPS))[None, :]
    return tl.load(scales + at, mask=mask, other=0)


@triton.jit
def load_row(
    x: tensor, units: tensor, shift: tl.constexpr, LINE: tl.constexpr,
    PER_UNIT: tl.constexpr,
) -> tensor:  # fmt: skip
    """Numbers [units, 16] of one row that meet the low or the high codes."""
    at = units[:, None] * PER_UNIT + shift + tl.arange(0, BYTES)[None, :]
    return tl.load(x + at, mask=(units < LINE)[:, None], other=0).to(tl.float32)


@triton.jit
def meet(
    b: tensor, scale: tensor, offset: tensor, low: tensor, high: tensor,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
) -> tensor:  # fmt: skip
    """What each unit adds to its row's product: float32 [rows, units].

    Unless EXACT, what floats hold above their 4 bits is taken off each unit's sum.
    """
    scale = scale.to(tl.float32)
    LIFTED: tl.constexpr = BITS == 4 and not EXACT
    if LIFTED:
        first, second = sixteenths(b)
    else:
        first, second = halves(b, BITS, FLOAT, ZERO)
    dot = tl.sum(first * low[None, :, :], 2)
    if BITS == 4:
        dot += tl.sum(second * high[None, :, :], 2)
    found = scale * (dot * 16 if LIFTED else dot)
    if OFFSET or LIFTED:
        amount = tl.sum(low, 1)
        if BITS == 4:
            amount = tl.sum(low + high, 1)
        shift = -(16 + ZERO) * scale if LIFTED else tl.zeros_like(scale)
        if OFFSET:
            shift += offset.to(tl.float32)
        found += shift * amount[None, :]
    return found


@triton.jit
def packed_row(
    x: tensor, delta: tensor, samples: tensor, gain: tensor, codes: tensor,
    scales: tensor, offsets: tensor, bias: tensor, total: tensor, y: tensor,
    x_stride: tensor, delta_stride: tensor, eps: tensor, N: tl.constexpr,
    LINE: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr,
    ZERO: tl.constexpr, OFFSET: tl.constexpr, NORMED: tl.constexpr,
    TAKES: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row, of a sum and its norm where NORMED: scaled after the product.

    N: rows of the result; GATED multiplies with as many again, which follow them.
    """
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    K: tl.constexpr = LINE * PER_UNIT
    TWICE: tl.constexpr = 2 * N
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    # Rows outside stay outside of the second half too.
    below = tl.where(rows < N, rows + N, 2 * N)
    units = tl.arange(0, UNITS)
    b = load_codes(codes, rows, units, N, LINE)
    if GATED:
        c = load_codes(codes, below, units, TWICE, LINE)
    follow(EARLY)
    token = tl.program_id(1).to(tl.int64)
    place = token
    if TAKES:
        place = tl.load(samples + token).to(tl.int64)
    sums = tl.zeros((ROWS, UNITS), tl.float32)
    ups = tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((UNITS,), tl.float32)
    for start in range(0, LINE, UNITS):
        units = start + tl.arange(0, UNITS)
        low = load_row(x + place * x_stride, units, 0, LINE, PER_UNIT)
        high = low
        if BITS == 4:
            high = load_row(x + place * x_stride, units, BYTES, LINE, PER_UNIT)
        if NORMED:
            more = delta + place * delta_stride
            low += load_row(more, units, 0, LINE, PER_UNIT)
            squares += tl.sum(low * low, 1)
            at = units[:, None] * PER_UNIT + tl.arange(0, BYTES)[None, :]
            first = (units < LINE)[:, None] & (tl.program_id(0) == 0)
            if not TAKES:
                tl.store(total + token * K + at, low, mask=first)
            low *= load_row(gain, units, 0, LINE, PER_UNIT)
            if BITS == 4:
                high += load_row(more, units, BYTES, LINE, PER_UNIT)
                squares += tl.sum(high * high, 1)
                if not TAKES:
                    tl.store(total + token * K + at + BYTES, high, mask=first)
                high *= load_row(gain, units, BYTES, LINE, PER_UNIT)
        scale = load_scales(scales, rows, units, N, LINE, GROUPS)
        offset = scale
        if OFFSET:
            offset = load_scales(offsets, rows, units, N, LINE, GROUPS)
        sums += meet(b, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT)
        if GATED:
            scale = load_scales(scales, below, units, TWICE, LINE, GROUPS)
            if OFFSET:
                offset = load_scales(offsets, below, units, TWICE, LINE, GROUPS)
            ups += meet(c, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT)
        if start + UNITS < LINE:
            b = load_codes(codes, rows, units + UNITS, N, LINE)
            if GATED:
                c = load_codes(codes, below, units + UNITS, TWICE, LINE)
    result = tl.sum(sums, 1)
    up = tl.sum(ups, 1)
    if NORMED:
        length = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result *= length
        up *= length
    if GATED:
        result = gated(result, up, SILU)
    if BIASED:
        result += tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(y + token * N + rows, result, mask=rows < N)


@triton.jit
def numbers(
    codes: tensor, scales: tensor, offsets: tensor, rows: tensor, units: tensor,
    N: tl.constexpr, LINE: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Weights [rows, units, 16] of the low and of the high codes, in float32."""
    b = load_codes(codes, rows, units, N, LINE)
    scale = load_scales(scales, rows, units, N, LINE, GROUPS).to(tl.float32)
    low, high = halves(b, BITS, FLOAT, ZERO)
    low *= scale[:, :, None]
    high *= scale[:, :, None]
    if OFFSET:
        offset = load_scales(offsets, rows, units, N, LINE, GROUPS).to(tl.float32)
        low += offset[:, :, None]
        high += offset[:, :, None]
    return low, high


@triton.jit
def unpack(
    codes: tensor, scales: tensor, offsets: tensor, y: tensor, N: tl.constexpr,
    LINE: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr,
    ZERO: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
) -> None:  # fmt: skip
    """Write weights as plain numbers."""
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    low, high = numbers(
        codes, scales, offsets, rows, units, N, LINE, GROUPS, BITS, FLOAT, ZERO, OFFSET
    )
    line = rows[:, None] * (LINE * PER_UNIT) + units[None, :] * PER_UNIT
    at = line[:, :, None] + tl.arange(0, BYTES)[None, None, :]
    mask = ((rows < N)[:, None] & (units < LINE)[None, :])[:, :, None]
    tl.store(y + at, low, mask=mask)
    if BITS == 4:
        tl.store(y + at + BYTES, high, mask=mask)
