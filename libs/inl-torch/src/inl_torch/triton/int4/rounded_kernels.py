"""Triton kernels of products of rows in float8 with codes of 4 bits.

The codes 0 to 15 are the bits of the E4M3 numbers 0 to 15 * 2**-9, so that unpacking
them for the matrix units is a mask. Offsets multiply the sums of each group of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.target_info import is_cuda

from inl_torch.triton.float8.kernels import operand, sum_parts
from inl_torch.triton.pdl import pdl_sync

UNIT = tl.constexpr(512.0)
"""Numbers of E4M3 that the codes of 4 bits are, in multiples of its least one."""

OFFSET_GROUPS = tl.constexpr(64)
"""Groups whose offsets are multiplied at once."""


LOW = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
HIGH = tl.constexpr("shr.b32 $0, $1, 4;\nand.b32 $0, $0, 0x0F0F0F0F;")


@triton.jit
def half_codes(b: tensor, HIGH_HALF: tl.constexpr) -> tensor:
    """Return the low or high halves of bytes as an operand of a product."""
    if is_cuda():
        text: tl.constexpr = HIGH if HIGH_HALF else LOW
        bits = tl.inline_asm_elementwise(
            text, "=r,r", [b], dtype=tl.uint8, is_pure=True, pack=4
        )
        codes = bits.to(tl.float8e4nv, bitcast=True)
    else:
        bits = b >> 4 if HIGH_HALF else b & 15
        codes = (bits.to(tl.float32) / UNIT).to(tl.bfloat16)
    return codes


@triton.jit
def load_pair(
    scales: tensor, row: tensor, is_row: tensor, chunk: tensor, chunks: tensor,
    end: tensor,
) -> tensor:  # fmt: skip
    """Load the two scales of a chunk of each row, int32 [ROWS]; 0 from ``end`` on."""
    at = row.to(tl.int64) * chunks + chunk
    return tl.load(scales + at, mask=is_row & (chunk < end), other=0)


@triton.jit
def scale_of(pair: tensor, HIGH_HALF: tl.constexpr) -> tensor:
    """Return the scales of the low or the high halves: float32 [ROWS, 1]."""
    bits = (pair >> (16 if HIGH_HALF else 0)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def chunk_sums(
    codes: tensor, x: tensor, pair: tensor, is_row: tensor, WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
) -> tensor:  # fmt: skip
    """Products of a chunk: ``WIDTH`` codes in low halves of bytes and in high ones."""
    b = tl.load(codes) if EVEN else tl.load(codes, mask=is_row[:, None], other=0)
    low_x = tl.trans(operand(tl.load(x)))
    high_x = tl.trans(operand(tl.load(x + WIDTH)))
    low = tl.dot(half_codes(b, False), low_x)
    high = tl.dot(half_codes(b, True), high_x)
    return low * scale_of(pair, False) + high * scale_of(pair, True)


@triton.jit
def offset_sums(
    acc: tensor, offsets: tensor, x_sums: tensor, row: tensor, is_row: tensor,
    source: tensor, begin: tensor, end: tensor, groups: tensor,
) -> tensor:  # fmt: skip
    """Add the products of offsets and of sums of groups."""
    for start in range(begin, end, OFFSET_GROUPS):
        group = start + tl.arange(0, OFFSET_GROUPS)
        inside = group < end
        o_at = offsets + row.to(tl.int64)[:, None] * groups + group[None, :]
        o = tl.load(o_at, mask=is_row[:, None] & inside[None, :], other=0)
        s_at = x_sums + source[:, None] * groups + group[None, :]
        s = tl.load(s_at, mask=(source >= 0)[:, None] & inside[None, :], other=0)
        acc = tl.dot(o, tl.trans(s), acc)
    return acc


# A single row is no other kernel, in which Triton loads rows one number at a time.
@triton.jit(do_not_specialize=["tokens"])
def rounded_int4(
    x: tensor, x_scales: tensor, x_sums: tensor, codes: tensor, scales: tensor,
    offsets: tensor, bias: tensor, y: tensor, parts: tensor, counters: tensor,
    tokens: tensor, n: tensor, k: tensor, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x`` [tokens, k] with a matrix [n, k].

    As ``streamed_float8``. Grid: tiles of tokens, which read the same weights, tiles of
    rows, parts of columns. codes: [n, k / 2], chunks of WIDTH bytes. scales: int32, two
    of float16 for a chunk of each row. offsets: float16 [n, k / WIDTH]. x_sums:
    [tokens, k / WIDTH]. EVEN: whether tiles divide the rows, and steps the chunks.
    """
    tile, part = tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < n, token < tokens
    chunks = k // (2 * WIDTH)
    byte = tl.arange(0, WIDTH)
    at = codes + row.to(tl.int64)[:, None] * (k // 2) + byte[None, :]
    source = tl.minimum(token, tokens - 1).to(tl.int64)
    x_at = x + source[:, None] * k + byte[None, :]
    steps = tl.cdiv(chunks, SPLITS * 2) * 2
    begin = part * steps
    end = tl.minimum(begin + steps, chunks)
    pair = load_pair(scales, row, is_row, begin, chunks, end)
    other = load_pair(scales, row, is_row, begin + 1, chunks, end)
    pdl_sync(PDL)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for chunk in tl.range(begin, end, 2, num_stages=STAGES):
        # Scales are loaded a step early. Those behind the end are 0.
        acc += chunk_sums(
            at + chunk * WIDTH, x_at + chunk * (2 * WIDTH), pair, is_row, WIDTH, EVEN
        )
        second = chunk + 1 if EVEN else tl.minimum(chunk + 1, chunks - 1)
        acc += chunk_sums(
            at + second * WIDTH, x_at + second * (2 * WIDTH), other, is_row, WIDTH, EVEN
        )
        pair = load_pair(scales, row, is_row, chunk + 2, chunks, end)
        other = load_pair(scales, row, is_row, chunk + 3, chunks, end)
    acc = offset_sums(
        acc * UNIT, offsets, x_sums, row, is_row, source, 2 * begin, 2 * end, 2 * chunks
    )
    both = is_token[None, :] & is_row[:, None]
    place = token.to(tl.int64)[None, :] * n + row[:, None]
    if SPLITS > 1:
        counter = counters + tile * tl.num_programs(0) + tl.program_id(0)
        last, acc = sum_parts(
            acc, parts, counter, part, place, both, n.to(tl.int64) * tokens,
            SPLITS,
        )  # fmt: skip
        if not last:
            return
    acc *= tl.load(x_scales + token, mask=is_token, other=0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=is_row, other=0).to(tl.float32)[:, None]
    tl.store(y + place, acc, mask=both)
