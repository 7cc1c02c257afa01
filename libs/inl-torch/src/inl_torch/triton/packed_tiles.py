"""Program that multiplies a few rows with packed weights on matrix units.

Codes reach the units as halves, exactly, and are scaled after them: a *slot* of a row
is some of its bytes that share a scale, and each slot's product is a sum of its own.
Codes of 4 bits are laid into the bits of a float, as BASE + code; what BASE adds, and
offsets, are taken from the sums of ``x``, a product with ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.target_info import is_cuda

FOUR = """{{
.reg .b32 low, high;
shl.b32 low, $4, {low};
shr.u32 high, $4, {high};
lop3.b32 low, low, {mask}, {bits}, 0xEA;
lop3.b32 high, high, {mask}, {bits}, 0xEA;
prmt.b32 $0, low, {top}, 0x4140;
prmt.b32 $1, low, {top}, 0x4342;
prmt.b32 $2, high, {top}, 0x4140;
prmt.b32 $3, high, {top}, 0x4342;
}}"""
"""Four bytes of codes become two pairs of low and two of high halves."""

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
"""Four floats of 8 bits become halves: with too small an exponent first, put right."""

FOUR_BFLOAT16 = tl.constexpr(
    FOUR.format(low=3, high=1, mask="0x78787878", bits="0x80808080", top="0x41414141")
)
FOUR_FLOAT16 = tl.constexpr(
    FOUR.format(low=4, high=0, mask="0xF0F0F0F0", bits="0", top="0x54545454")
)
FLOAT8_BFLOAT16 = tl.constexpr(
    FLOAT8.format(shift=4, mask="0x07F007F0", times="0x7B807B80", kind="bf16x2")
)
FLOAT8_FLOAT16 = tl.constexpr(
    FLOAT8.format(shift=1, mask="0x3F803F80", times="0x5C005C00", kind="f16x2")
)


@triton.jit
def pairs(b: tensor, half: tl.constexpr) -> tuple[tensor, tensor]:
    """Low and high codes of bytes, above 16 in bfloat16 and above 64 in float16."""
    BRAIN: tl.constexpr = half == tl.bfloat16
    if is_cuda():
        low, high = tl.inline_asm_elementwise(
            FOUR_BFLOAT16 if BRAIN else FOUR_FLOAT16, "=r,=r,=r,=r,r", [b],
            dtype=(tl.int16, tl.int16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = b.to(tl.int16)
        if BRAIN:
            low = ((wide << 3) & 0x78) | 0x4180
            high = ((wide >> 1) & 0x78) | 0x4180
        else:
            low = ((wide << 4) & 0xF0) | 0x5400
            high = (wide & 0xF0) | 0x5400
    return low.to(half, bitcast=True), high.to(half, bitcast=True)


@triton.jit
def single(b: tensor, FLOAT: tl.constexpr, half: tl.constexpr) -> tensor:
    """Codes of 8 bits."""
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
    x_stride: tensor, count: tensor, N: tl.constexpr, LINE: tl.constexpr,
    GROUPS: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr,
    OFFSET: tl.constexpr, BIASED: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``count`` rows of a half type; products and sums are float32's.

    LINE: bytes of a row of codes; WIDTH: of a slot, 16 where codes have 4 bits.
    """
    half: tl.constexpr = x.dtype.element_ty
    PER_SLOT: tl.constexpr = WIDTH * 8 // BITS
    BASE: tl.constexpr = 0 if BITS == 8 else 16 if half == tl.bfloat16 else 64
    MOVED: tl.constexpr = OFFSET or BITS == 4
    WHOLE: tl.constexpr = LINE % (SLOTS * WIDTH) == 0
    tokens = tl.arange(0, TOKENS).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    byte = tl.arange(0, WIDTH)
    ones = tl.full((SLOTS, ROWS, WIDTH), 1.0, tl.float32).to(half)
    sums = tl.zeros((SLOTS, ROWS, TOKENS), tl.float32)
    for start in tl.range(0, LINE, SLOTS * WIDTH, num_stages=STAGES):
        slot = start // WIDTH + tl.arange(0, SLOTS)
        held = (rows < N)[:, None, None]
        taken = (tokens < count)[:, None, None]
        scaled = (rows < N)[None, :]
        if not WHOLE:
            inside = slot * WIDTH < LINE
            held &= inside[None, :, None]
            taken &= inside[None, :, None]
            scaled &= inside[:, None]
        at = (slot[:, None] * WIDTH + byte[None, :])[None, :, :]
        b = tl.load(codes + rows[:, None, None] * LINE + at, mask=held, other=0)
        b = tl.permute(b, (1, 0, 2))
        at = (slot[:, None] * PER_SLOT + byte[None, :])[None, :, :]
        cells = x + tokens[:, None, None] * x_stride + at
        a = tl.permute(tl.load(cells, mask=taken, other=0), (1, 2, 0))
        if BITS == 4:
            low, high = pairs(b, half)
            c = tl.permute(tl.load(cells + WIDTH, mask=taken, other=0), (1, 2, 0))
            found = tl.dot(high, c, tl.dot(low, a))
            amount = tl.dot(ones, c, tl.dot(ones, a))
        elif GROUPS == 1 and not MOVED:
            sums = tl.dot(single(b, FLOAT, half), a, sums)
        else:
            found = tl.dot(single(b, FLOAT, half), a)
            if MOVED:
                amount = tl.dot(ones, a)
        if GROUPS > 1 or MOVED:
            group = slot // (LINE // WIDTH // GROUPS)
            at = rows[None, :] * GROUPS + group[:, None]
            scale = tl.load(scales + at, mask=scaled, other=0).to(tl.float32)
            sums += found * scale[:, :, None]
            if MOVED:
                offset = scale * -(BASE + ZERO)
                if OFFSET:
                    offset += tl.load(offsets + at, mask=scaled, other=0)
                sums += amount * offset[:, :, None]
    result = tl.sum(sums, 0)
    if GROUPS == 1 and not MOVED:
        scale = tl.load(scales + rows, mask=rows < N, other=0).to(tl.float32)
        result *= scale[:, None]
    if BIASED:
        more = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += more[:, None]
    mask = (rows < N)[:, None] & (tokens < count)[None, :]
    tl.store(y + tokens[None, :] * N + rows[:, None], result, mask=mask)
