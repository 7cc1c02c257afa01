"""Triton kernel of products of a few rows with packed weights, on matrix units.

Codes are converted exactly to the half-precision dtype and scaled after the product.
Each warp multiplies one *slot* of every row, 32 bytes of codes, and has its own
accumulator. A slot with two scales is multiplied with ``x`` twice, with one half zeroed
each time. 4-bit codes are inserted into the bits of a float, as BASE + code; BASE and
offsets are corrected by sums of ``x``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.target_info import is_cuda

from inl_torch.triton.quantized.kernels import BYTES

SLOT_BYTES = tl.constexpr(32)
"""Bytes of a slot, which is two units."""

FOUR = """{{
.reg .b32 w;
{shift}.b32 w, $2, {by};
lop3.b32 w, w, {mask}, {bits}, 0xEA;
prmt.b32 $0, w, {top}, 0x4140;
prmt.b32 $1, w, {top}, 0x4342;
}}"""
"""PTX: convert the low or the high codes of four bytes to two pairs of halves."""

FLOAT8 = """{{
.reg .b32 a, b, s, t, times, zero;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, {shift};
shr.u32 t, b, {shift};
and.b32 s, s, {mask};
and.b32 t, t, {mask};
lop3.b32 a, a, 0x80008000, s, 0xEA;
lop3.b32 b, b, 0x80008000, t, 0xEA;
mov.b32 times, {times};
mov.b32 zero, 0x80008000;
fma.rn.{kind} $0, a, times, zero;
fma.rn.{kind} $1, b, times, zero;
}}"""
"""PTX: convert four float8 to halves; a multiplication corrects the exponents."""

BFLOAT16 = {"mask": "0x78787878", "bits": "0x80808080", "top": "0x41414141"}
FLOAT16 = {"mask": "0xF0F0F0F0", "bits": "0", "top": "0x54545454"}
LOW_BFLOAT16 = tl.constexpr(FOUR.format(shift="shl", by=3, **BFLOAT16))
HIGH_BFLOAT16 = tl.constexpr(FOUR.format(shift="shr", by=1, **BFLOAT16))
LOW_FLOAT16 = tl.constexpr(FOUR.format(shift="shl", by=4, **FLOAT16))
HIGH_FLOAT16 = tl.constexpr(FOUR.format(shift="shr", by=0, **FLOAT16))
FLOAT8_BFLOAT16 = tl.constexpr(
    FLOAT8.format(shift=4, mask="0x07F007F0", times="0x7B807B80", kind="bf16x2")
)
FLOAT8_FLOAT16 = tl.constexpr(
    FLOAT8.format(shift=1, mask="0x3F803F80", times="0x5C005C00", kind="f16x2")
)


@triton.jit
def unpack_4bit(b: tensor, HIGH: tl.constexpr, half: tl.constexpr) -> tensor:
    """Convert low or high codes to ``16 + code`` in bfloat16, ``64 + code`` in
    float16.
    """
    IS_BFLOAT16: tl.constexpr = half == tl.bfloat16
    if is_cuda():
        low: tl.constexpr = LOW_BFLOAT16 if IS_BFLOAT16 else LOW_FLOAT16
        high: tl.constexpr = HIGH_BFLOAT16 if IS_BFLOAT16 else HIGH_FLOAT16
        bits = tl.inline_asm_elementwise(
            high if HIGH else low, "=r,=r,r", [b], dtype=tl.int16, is_pure=True, pack=4
        )
    else:
        wide = b.to(tl.int16)
        if IS_BFLOAT16:
            bits = (((wide >> 1) if HIGH else (wide << 3)) & 0x78) | 0x4180
        else:
            bits = ((wide if HIGH else (wide << 4)) & 0xF0) | 0x5400
    return bits.to(half, bitcast=True)


@triton.jit
def unpack_8bit(b: tensor, FLOAT: tl.constexpr, half: tl.constexpr) -> tensor:
    """Convert 8-bit codes (int8 or float8 e4m3)."""
    if not FLOAT:
        return b.to(tl.int8, bitcast=True).to(tl.float32).to(half)
    if is_cuda():
        bits = tl.inline_asm_elementwise(
            FLOAT8_BFLOAT16 if half == tl.bfloat16 else FLOAT8_FLOAT16, "=r,=r,r", [b],
            dtype=tl.int16, is_pure=True, pack=4,
        )  # fmt: skip
        return bits.to(half, bitcast=True)
    wide = b.to(tl.int32)
    bits = ((wide & 128) << 24) | ((wide & 127) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(half)


@triton.jit
def packed_rows(
    x: tensor, codes: tensor, scales: tensor, offsets: tensor, bias: tensor, y: tensor,
    x_stride: tensor, count: tensor, N: tl.constexpr, ROW_UNITS: tl.constexpr,
    GROUPS: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr,
    OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Product of ``count`` rows of half precision, accumulated in float32.

    The second axis of the grid are blocks of TOKENS rows. LINE: units per row of codes.
    PARTS: scales per slot, 1 or 2.
    """
    half: tl.constexpr = x.dtype.element_ty
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    UNITS: tl.constexpr = SLOT_BYTES // BYTES
    PER_PART: tl.constexpr = UNITS * PER_UNIT // PARTS
    BASE: tl.constexpr = 0 if BITS == 8 else 16 if half == tl.bfloat16 else 64
    SHIFTED: tl.constexpr = OFFSET or BITS == 4
    SCALED: tl.constexpr = GROUPS > 1 or SHIFTED
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PARTS * TOKENS)
    part = tl.arange(0, PARTS)
    byte = tl.arange(0, SLOT_BYTES)
    own_half = (column // TOKENS)[:, None] == (byte // (SLOT_BYTES // PARTS))[None, :]
    first = tl.program_id(1) * TOKENS
    own_half &= (first + column % TOKENS < count)[:, None]
    input_pointers = x + (first + column % TOKENS).to(tl.int64)[:, None] * x_stride
    input_pointers += (byte // BYTES * PER_UNIT + byte % BYTES)[None, :]
    token = first + tl.arange(0, TOKENS)
    row_pointers = x + token.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((SLOTS, ROWS, PARTS * TOKENS), tl.float32)
    if SCALED:
        acc = acc.reshape(SLOTS, ROWS, PARTS, TOKENS)
    for start in tl.range(0, ROW_UNITS, SLOTS * UNITS, num_stages=STAGES):
        slot = start // UNITS + tl.arange(0, SLOTS)
        at = slot[:, None] * SLOT_BYTES + byte[None, :]
        inside = (at < ROW_UNITS * BYTES)[:, None, :]
        pointers = codes + rows[None, :, None] * (ROW_UNITS * BYTES) + at[:, None, :]
        b = tl.load(pointers, mask=inside & (rows < N)[None, :, None], other=0)
        pointers = input_pointers[None, :, :] + slot[:, None, None] * (PER_PART * PARTS)
        a = tl.load(pointers, mask=inside & own_half[None, :, :], other=0)
        if BITS == 4:
            c = tl.load(pointers + BYTES, mask=inside & own_half[None, :, :], other=0)
            product = tl.dot(unpack_4bit(b, False, half), tl.permute(a, (0, 2, 1)))
            product = tl.dot(
                unpack_4bit(b, True, half), tl.permute(c, (0, 2, 1)), product
            )
        elif SCALED:
            product = tl.dot(unpack_8bit(b, FLOAT, half), tl.permute(a, (0, 2, 1)))
        else:
            acc = tl.dot(unpack_8bit(b, FLOAT, half), tl.permute(a, (0, 2, 1)), acc)
        if SCALED:
            unit = slot[:, None] * UNITS + part[None, :] * (UNITS // PARTS)
            at = (
                rows[None, :, None] * GROUPS
                + (unit // (ROW_UNITS // GROUPS))[:, None, :]
            )
            mask = (unit < ROW_UNITS)[:, None, :] & (rows < N)[None, :, None]
            scale = tl.load(scales + at, mask=mask, other=0).to(tl.float32)
            product = product.reshape(SLOTS, ROWS, PARTS, TOKENS)
            acc += product * scale[:, :, :, None]
            if SHIFTED:
                offset = scale * -(BASE + ZERO)
                if OFFSET:
                    offset += tl.load(offsets + at, mask=mask, other=0)
                at = unit[:, :, None] * PER_UNIT + tl.arange(0, PER_PART)[None, None, :]
                at = at[:, :, None, :]
                mask = (at < ROW_UNITS * PER_UNIT) & (token < count)[
                    None, None, :, None
                ]
                input_sum = tl.load(
                    row_pointers[None, None, :, :] + at, mask=mask, other=0
                )
                input_sum = tl.sum(input_sum.to(tl.float32), 3)
                acc += input_sum[:, None, :, :] * offset[:, :, :, None]
    result = tl.sum(acc, 0)
    if SCALED:
        result = tl.sum(result, 1)
    else:
        scale = tl.load(scales + rows, mask=rows < N, other=0).to(tl.float32)
        result *= scale[:, None]
    if HAS_BIAS:
        bias_values = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += bias_values[:, None]
    mask = (rows < N)[:, None] & (token < count)[None, :]
    tl.store(y + token.to(tl.int64)[None, :] * N + rows[:, None], result, mask=mask)
