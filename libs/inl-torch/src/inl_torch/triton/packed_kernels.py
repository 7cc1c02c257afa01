"""Programs that multiply packed weights: see :mod:`inl_torch.triton.packed`.

A *unit* is 16 bytes of codes, four words, which a thread holds. A word has its codes at
``POSITIONS`` places; the four words of a unit have consecutive ones at each place, so
that they meet four numbers in a row.

Codes become float32 by their bits: with the exponent of its last bit's worth in front,
an integer stands for itself and the leading bit, which is taken off again, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.mlp import gated
from inl_torch.triton.programs import follow

WORDS = tl.constexpr(4)
"""Words of a unit."""


@triton.jit
def code(
    words: tensor, magic: tensor, PLACE: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr,
) -> tensor:  # fmt: skip
    """The codes at one place of each word, as float32.

    magic: 0x4B000000, at run time, for the compiler then keeps it in a register and
    needs one instruction for mask and exponent.
    """
    AT: tl.constexpr = PLACE * BITS
    if FLOAT:
        low: tl.constexpr = 24 - AT
        sign = (words << low) & -2147483648
        if AT >= 24:
            rest = (words >> (AT - 20)) & 0x07F00000
        else:
            rest = (words << (20 - AT) if AT <= 20 else words) & 0x07F00000
        return (sign | rest).to(tl.float32, bitcast=True) * 1.329227995784916e36
    # Codes that would reach into the exponent are moved down by a multiple of BITS.
    MOVED: tl.constexpr = (
        (12 if AT > 16 else 0) if BITS == 4 else (AT - 8 if AT > 8 else 0)
    )
    HELD: tl.constexpr = AT - MOVED
    if MOVED > 0:
        words = words >> MOVED
    MASK: tl.constexpr = ((1 << BITS) - 1) << HELD
    LEAD: tl.constexpr = 1 << (23 - HELD)
    bits = (words & MASK) | (magic - (HELD << 23))
    return bits.to(tl.float32, bitcast=True) - (LEAD + ZERO)


@triton.jit
def load_words(
    codes: tensor, rows: tensor, units: tensor, N: tl.constexpr, LINE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Words [1, rows, units, 4], zeros outside."""
    line = rows[None, :, None, None] * (LINE * WORDS)
    at = line + units[None, None, :, None] * WORDS
    mask = (rows < N)[None, :, None, None] & (units < LINE)[None, None, :, None]
    word = tl.arange(0, WORDS)[None, None, None, :]
    return tl.load(codes + at + word, mask=mask, other=0)


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
def four(
    x: tensor, lines: tensor, units: tensor, place: tl.constexpr, known: tensor,
    LINE: tl.constexpr, POSITIONS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Numbers [tokens, 1, units, 4] of each line that codes at one place meet."""
    at = units[None, None, :, None] * (POSITIONS * WORDS) + place * WORDS
    cells = x + lines[:, None, None, None] + at
    mask = known[:, None, None, None] & (units < LINE)[None, None, :, None]
    word = tl.arange(0, WORDS)[None, None, None, :]
    return tl.load(cells + word, mask=mask, other=0).to(tl.float32)


@triton.jit
def scaled(
    dot: tensor, amount: tensor, scale: tensor, offset: tensor, OFFSET: tl.constexpr,
) -> tensor:  # fmt: skip
    """What units add to their rows [tokens, rows, units], from [..., 4] apart."""
    found = tl.sum(dot, 3) * scale.to(tl.float32)[None, :, :]
    if OFFSET:
        found += tl.sum(amount, 3) * offset.to(tl.float32)[None, :, :]
    return found


@triton.jit
def packed_product(
    x: tensor, delta: tensor, samples: tensor, gain: tensor, codes: tensor,
    scales: tensor, offsets: tensor, bias: tensor, total: tensor, y: tensor,
    x_stride: tensor, delta_stride: tensor, eps: tensor, magic: tensor, count: tensor,
    N: tl.constexpr, LINE: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    NORMED: tl.constexpr, TAKES: tl.constexpr, BIASED: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``count`` rows, of a sum and its norm where NORMED: scaled at the end.

    N: rows of the result; GATED multiplies with as many again, which follow them.
    """
    POSITIONS: tl.constexpr = 32 // BITS
    K: tl.constexpr = LINE * POSITIONS * WORDS
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    # Rows outside stay outside of the second half too.
    below = tl.where(rows < N, rows + N, 2 * N)
    units = tl.arange(0, UNITS)
    words = load_words(codes, rows, units, N, LINE)
    if GATED:
        others = load_words(codes, below, units, 2 * N, LINE)
    follow(EARLY)
    tokens = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    known = tokens < count
    places = tokens
    if TAKES:
        places = tl.load(samples + tokens, mask=known, other=0).to(tl.int64)
    sums = tl.zeros((TOKENS, ROWS, UNITS), tl.float32)
    ups = tl.zeros((TOKENS, ROWS, UNITS), tl.float32)
    squares = tl.zeros((TOKENS, 1, UNITS, WORDS), tl.float32)
    for start in range(0, LINE, UNITS):
        units = start + tl.arange(0, UNITS)
        dot = tl.zeros((TOKENS, ROWS, UNITS, WORDS), tl.float32)
        up = tl.zeros((TOKENS, ROWS, UNITS, WORDS), tl.float32)
        amount = tl.zeros((TOKENS, 1, UNITS, WORDS), tl.float32)
        for place in tl.static_range(0, POSITIONS):
            a = four(x, places * x_stride, units, place, known, LINE, POSITIONS)
            if NORMED:
                line = places * delta_stride
                a += four(delta, line, units, place, known, LINE, POSITIONS)
                squares += a * a
                if not TAKES:
                    at = units[None, None, :, None] * (POSITIONS * WORDS)
                    at += place * WORDS + tl.arange(0, WORDS)[None, None, None, :]
                    mask = known[:, None, None, None] & (tl.program_id(0) == 0)
                    mask = mask & (units < LINE)[None, None, :, None]
                    cells = total + tokens[:, None, None, None] * K + at
                    tl.store(cells, a, mask=mask)
                line = tl.zeros((1,), tl.int64)
                a *= four(gain, line, units, place, line == 0, LINE, POSITIONS)
            dot += code(words, magic, place, BITS, FLOAT, ZERO) * a
            if GATED:
                up += code(others, magic, place, BITS, FLOAT, ZERO) * a
            if OFFSET:
                amount += a
        scale = load_scales(scales, rows, units, N, LINE, GROUPS)
        offset = scale
        if OFFSET:
            offset = load_scales(offsets, rows, units, N, LINE, GROUPS)
        sums += scaled(dot, amount, scale, offset, OFFSET)
        if GATED:
            scale = load_scales(scales, below, units, 2 * N, LINE, GROUPS)
            if OFFSET:
                offset = load_scales(offsets, below, units, 2 * N, LINE, GROUPS)
            ups += scaled(up, amount, scale, offset, OFFSET)
        if start + UNITS < LINE:
            words = load_words(codes, rows, units + UNITS, N, LINE)
            if GATED:
                others = load_words(codes, below, units + UNITS, 2 * N, LINE)
    result = tl.sum(sums, 2)
    second = tl.sum(ups, 2)
    if NORMED:
        length = tl.sum(tl.sum(tl.sum(squares, 3), 2), 1)
        length = tl.rsqrt(length / K + eps)[:, None]
        result *= length
        second *= length
    if GATED:
        result = gated(result, second, SILU)
    if BIASED:
        more = tl.load(bias + rows, mask=rows < N, other=0).to(tl.float32)
        result += more[None, :]
    mask = known[:, None] & (rows < N)[None, :]
    tl.store(y + tokens[:, None] * N + rows[None, :], result, mask=mask)


@triton.jit
def unpack(
    codes: tensor, scales: tensor, offsets: tensor, y: tensor, magic: tensor,
    N: tl.constexpr, LINE: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:  # fmt: skip
    """Write weights as plain numbers."""
    POSITIONS: tl.constexpr = 32 // BITS
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    words = load_words(codes, rows, units, N, LINE)
    scale = load_scales(scales, rows, units, N, LINE, GROUPS).to(tl.float32)
    unit = rows[:, None] * LINE + units[None, :]
    mask = ((rows < N)[:, None] & (units < LINE)[None, :])[None, :, :, None]
    word = tl.arange(0, WORDS)[None, None, None, :]
    for place in tl.static_range(0, POSITIONS):
        numbers = code(words, magic, place, BITS, FLOAT, ZERO)
        numbers *= scale[None, :, :, None]
        if OFFSET:
            more = load_scales(offsets, rows, units, N, LINE, GROUPS)
            numbers += more.to(tl.float32)[None, :, :, None]
        at = (unit[None, :, :, None] * POSITIONS + place) * WORDS + word
        tl.store(y + at, numbers, mask=mask)
