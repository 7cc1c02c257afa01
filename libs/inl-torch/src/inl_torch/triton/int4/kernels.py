"""Triton kernels of products of rows in half precision with codes of 4 bits.

Codes are inserted into the bits of a float, which makes them ``BASE + code``. Products
of a group are scaled after the matrix units, and ``BASE`` and the offset of a group
multiply the sum of its activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.float8.kernels import LARGEST, sum_parts, to_float8
from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.quantized.tiles import unpack_4bit


@triton.jit
def load_pair(scales: tensor, row: tensor, chunk: tensor, chunks: tensor) -> tensor:
    """Load the two scales of a chunk of each row: int32 [ROWS]."""
    at = scales.to(tl.pointer_type(tl.int32), bitcast=True) + row * chunks + chunk
    return tl.load(at)


@triton.jit
def scale_of(pair: tensor, HIGH_HALF: tl.constexpr) -> tensor:
    """Return the numbers of the low or the high halves: float32 [ROWS, 1]."""
    bits = (pair >> (16 if HIGH_HALF else 0)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def chunk_sums(
    codes: tensor, pair: tensor, low_x: tensor, high_x: tensor, half: tl.constexpr
) -> tensor:
    """Products of a chunk: codes in low halves of bytes and in high ones."""
    b = tl.load(codes)
    low = tl.dot(unpack_4bit(b, False, half), low_x)
    high = tl.dot(unpack_4bit(b, True, half), high_x)
    return low * scale_of(pair, False) + high * scale_of(pair, True)


@triton.jit
def load_shifts(
    scales: tensor, offsets: tensor, row: tensor, group: tensor, end: tensor,
    groups: tensor, half: tl.constexpr,
) -> tensor:  # fmt: skip
    """What the sums of groups are multiplied by: float32 [ROWS, GROUPS]."""
    BASE: tl.constexpr = 16.0 if half == tl.bfloat16 else 64.0
    at = row[:, None] * groups + group[None, :]
    inside = (group < end)[None, :]
    scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    return tl.load(offsets + at, mask=inside, other=0).to(tl.float32) - BASE * scale


@triton.jit
def load_sums(
    x_sums: tensor, token: tensor, is_token: tensor, group: tensor, end: tensor,
    groups: tensor,
) -> tensor:  # fmt: skip
    """Sums of groups of rows: float32 [GROUPS, TOKENS]."""
    at = x_sums + token[:, None] * groups + group[None, :]
    inside = is_token[:, None] & (group < end)[None, :]
    return tl.trans(tl.load(at, mask=inside, other=0))


@triton.jit
def sum_groups(
    x: tensor, sums: tensor, x_stride: tensor, groups: tensor, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sums of groups of ``WIDTH`` numbers of each row: [tokens, groups].

    Grid: rows, tiles of ``GROUPS``.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, WIDTH)
    at = x + row * x_stride + group[:, None] * WIDTH + column[None, :]
    inside = group < groups
    pdl_sync(PDL)
    values = tl.load(at, mask=inside[:, None], other=0).to(tl.float32)
    tl.store(sums + row * groups + group, tl.sum(values, 1), mask=inside)


# A single row is no other kernel, in which Triton loads rows one number at a time.
@triton.jit(do_not_specialize=["tokens"])
def streamed_int4(
    x: tensor, x_sums: tensor, codes: tensor, scales: tensor, offsets: tensor,
    bias: tensor, y: tensor, parts: tensor, counters: tensor, tokens: tensor, n: tensor,
    k: tensor, x_stride: tensor, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x`` [tokens, k] with a matrix [n, k], or [2 n, k] if ``GATED``.

    Grid: tiles of rows, parts of columns. If there are several parts,
    their sums are stored in ``parts`` [SPLITS, tokens, n], and the last program of a
    tile adds them in order; counters: a multiple of ``SPLITS`` for each tile between
    launches. codes: [n, k / 2], chunks of ``WIDTH`` bytes. scales, offsets: float16
    [n, k / WIDTH]. x_sums: sums of groups of ``x`` [tokens, k / WIDTH]. GROUPS: groups
    whose offsets are multiplied at once.
    """
    half: tl.constexpr = x.dtype.element_ty
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    # Rows beyond the last repeat it, as loads without a mask are faster.
    row = tl.minimum(row, n - 1).to(tl.int64)
    token = tl.arange(0, TOKENS).to(tl.int64)
    is_token = token < tokens
    bytes_of_row = k // 2
    chunks = k // (2 * WIDTH)
    byte = tl.arange(0, WIDTH)
    at = codes + row[:, None] * bytes_of_row + byte[None, :]
    up = row + n
    up_at = at + n.to(tl.int64) * bytes_of_row
    x_at = x + token[:, None] * x_stride + byte[None, :]
    steps = tl.cdiv(chunks, SPLITS)
    begin = part * steps
    end = tl.minimum(begin + steps, chunks)
    groups, last_group = 2 * chunks, 2 * end
    group = 2 * begin + tl.arange(0, GROUPS)
    shifts = load_shifts(scales, offsets, row, group, last_group, groups, half)
    up_shifts = shifts
    if GATED:
        up_shifts = load_shifts(scales, offsets, up, group, last_group, groups, half)
    pdl_sync(PDL)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    up_acc = acc
    sums = load_sums(x_sums, token, is_token, group, last_group, groups)
    acc = tl.dot(shifts, sums, acc, input_precision="tf32x3")
    if GATED:
        up_acc = tl.dot(up_shifts, sums, up_acc, input_precision="tf32x3")
    for start in range(2 * begin + GROUPS, last_group, GROUPS):
        group = start + tl.arange(0, GROUPS)
        sums = load_sums(x_sums, token, is_token, group, last_group, groups)
        shifts = load_shifts(scales, offsets, row, group, last_group, groups, half)
        acc = tl.dot(shifts, sums, acc, input_precision="tf32x3")
        if GATED:
            shifts = load_shifts(scales, offsets, up, group, last_group, groups, half)
            up_acc = tl.dot(shifts, sums, up_acc, input_precision="tf32x3")
    for chunk in tl.range(begin, end, num_stages=STAGES):
        source = x_at + chunk * (2 * WIDTH)
        low_x = tl.trans(tl.load(source, mask=is_token[:, None], other=0))
        high_x = tl.trans(tl.load(source + WIDTH, mask=is_token[:, None], other=0))
        pair = load_pair(scales, row, chunk, chunks)
        acc += chunk_sums(at + chunk * WIDTH, pair, low_x, high_x, half)
        if GATED:
            pair = load_pair(scales, up, chunk, chunks)
            up_acc += chunk_sums(up_at + chunk * WIDTH, pair, low_x, high_x, half)
    both = is_token[None, :] & is_row[:, None]
    place = token[None, :] * n + row[:, None]
    if SPLITS > 1:
        last, acc = sum_parts(
            acc, parts, counters + tile, part, place, both, n.to(tl.int64) * tokens,
            SPLITS,
        )  # fmt: skip
        if not last:
            return
    if GATED:
        acc = activate_gate(acc, up_acc, SILU)
    if HAS_BIAS:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(y + place, acc, mask=both)


@triton.jit
def unpack_int4(
    codes: tensor, scales: tensor, offsets: tensor, y: tensor, n: tensor, k: tensor,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Store decoded weights [n, k]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    chunks = k // (2 * WIDTH)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    inside = (row < n)[:, None] & (chunk < chunks)[None, :]
    group = row[:, None] * chunks + chunk[None, :]
    pair = tl.load(scales + group, mask=inside, other=0)
    at = group[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    b = tl.load(codes + at, mask=inside[:, :, None], other=0)
    for half in tl.static_range(2):
        bits = (pair >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True)
        offset = tl.load(offsets + group * 2 + half, mask=inside, other=0)
        code = ((b >> (4 * half)) & 15).to(tl.float32)
        values = code * bits.to(tl.float32)[:, :, None]
        values += offset.to(tl.float32)[:, :, None]
        y_at = group[:, :, None] * (2 * WIDTH) + half * WIDTH
        y_at += tl.arange(0, WIDTH)[None, None, :]
        tl.store(y + y_at, values, mask=inside[:, :, None])


@triton.jit
def round_int4(
    codes: tensor, scales: tensor, offsets: tensor, y: tensor, y_scales: tensor,
    n: tensor, k: tensor, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """Round decoded weights to E4M3 [n, k], with a scale of each row [n].

    The scale makes the largest number that codes may be 448. GROUPS: all of a row, or
    more.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < n
    groups, chunks = k // WIDTH, k // (2 * WIDTH)
    each = tl.arange(0, GROUPS)[None, :]
    at = row[:, None] * groups + each
    inside = is_row[:, None] & (each < groups)
    low = tl.load(offsets + at, mask=inside, other=0).to(tl.float32)
    step = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(low + 15 * step)), 1)
    y_scale = largest / LARGEST
    tl.store(y_scales + row, y_scale, mask=is_row)
    factor = (1.0 / tl.where(largest > 0, y_scale, 1.0))[:, None]
    byte = tl.arange(0, WIDTH)[None, None, :]
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        is_chunk = is_row[:, None] & (chunk < chunks)[None, :]
        group = row[:, None] * chunks + chunk[None, :]
        b = tl.load(
            codes + group[:, :, None] * WIDTH + byte, mask=is_chunk[:, :, None], other=0
        ).to(tl.int32)
        for half in tl.static_range(2):
            scale = tl.load(scales + group * 2 + half, mask=is_chunk, other=0)
            offset = tl.load(offsets + group * 2 + half, mask=is_chunk, other=0)
            # Converting codes to floats would take longest: these are 1 + code / 16.
            scale = scale.to(tl.float32) * factor * 16
            offset = offset.to(tl.float32) * factor - scale
            bits = ((b << (19 - 4 * half)) & 0x780000) | 0x3F800000
            values = bits.to(tl.float32, bitcast=True) * scale[:, :, None]
            values += offset[:, :, None]
            values = tl.clamp(values, -LARGEST, LARGEST)
            stored, _ = to_float8(values, False)
            y_at = y + (group * 2 + half)[:, :, None] * WIDTH + byte
            tl.store(y_at, stored, mask=is_chunk[:, :, None])
