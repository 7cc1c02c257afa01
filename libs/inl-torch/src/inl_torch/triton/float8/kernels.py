"""Triton kernels of products in float8: rows are quantized, and matrices streamed."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.target_info import is_cuda

from inl_torch.triton.barrier import finish_stores
from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.quantized.kernels import unpack_8bit

LARGEST = tl.constexpr(448.0)
"""Largest magnitude of E4M3."""


@triton.jit
def to_float8(values: tensor, EXACT: tl.constexpr) -> tuple[tensor, tensor]:
    """Round to the nearest E4M3, ties to even; magnitudes are at most 448.

    Returns codes, and if ``EXACT`` their values in float32.
    """
    if is_cuda() and not EXACT:
        codes = values.to(tl.float8e4nv)
    else:
        # Triton's interpreter loses carries and ties, so that it gets exact numbers.
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = (tl.abs(values) + 16384.0) - 16384.0  # a multiple of 2**-9
        small = tl.where(values < 0, -small, small)
        rounded = rounded.to(tl.float32, bitcast=True)
        values = tl.where(tl.abs(values) < 0.015625, small, rounded)
        codes = values.to(tl.float8e4nv)
    return codes, values


@triton.jit
def quantize(
    x: tensor, delta: tensor, norm_weight: tensor, summed: tensor, codes: tensor,
    scales: tensor, sums: tensor, x_stride: tensor, delta_stride: tensor, width: tensor,
    eps: tensor, NORMED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Round a row to E4M3 with a scale of its own.

    WIDTH: codes whose sum is stored in ``sums``, float16; 0 for none.

    NORMED: the row is the norm of ``x + delta``, which is stored too. GATED: it is the
    activation of the first half of ``x`` [2 * width], times the second half.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if NORMED:
        gain = tl.load(norm_weight + column, mask=inside, other=0).to(tl.float32)
    pdl_sync(PDL)
    at = x + row * x_stride + column
    values = tl.load(at, mask=inside, other=0).to(tl.float32)
    if GATED:
        up = tl.load(at + width, mask=inside, other=0).to(tl.float32)
        values = activate_gate(values, up, SILU)
    if NORMED:
        update = tl.load(delta + row * delta_stride + column, mask=inside, other=0)
        values += update.to(tl.float32)
        tl.store(summed + row * width + column, values, mask=inside)
        values *= tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gain
    # The scale of a row with infinity or NaN is NaN, and so are its products.
    size = tl.where(values == values, tl.abs(values), float("inf"))
    largest = tl.max(size, 0)
    values = tl.where(size < float("inf"), values, 1.0)
    scaled = values * (LARGEST / tl.where(largest > 0, largest, 1.0))
    rounded = tl.clamp(scaled, -LARGEST, LARGEST)
    stored, exact = to_float8(rounded, WIDTH > 0)
    tl.store(codes + row * width + column, stored, mask=inside)
    if WIDTH:
        group = tl.arange(0, BLOCK // WIDTH)
        total = tl.sum(tl.reshape(exact, (BLOCK // WIDTH, WIDTH)), 1)
        groups = width // WIDTH
        tl.store(sums + row * groups + group, total, mask=group < groups)
    scale = tl.where(largest < float("inf"), largest / LARGEST, float("nan"))
    tl.store(scales + row, scale)


@triton.jit
def load_codes(
    at: tensor, is_row: tensor, columns: tensor, k: tensor, EVEN: tl.constexpr
) -> tensor:
    """Load a tile of E4M3, 0 out of bounds."""
    if EVEN:
        return tl.load(at)
    inside = is_row[:, None] & (columns < k)[None, :]
    bits = tl.load(at.to(tl.pointer_type(tl.uint8), bitcast=True), mask=inside, other=0)
    return bits.to(tl.float8e4nv, bitcast=True)


LINE = tl.constexpr(128)


@triton.jit
def fetch(at: tensor) -> None:
    """Read lines into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def operand(codes: tensor) -> tensor:
    """Return codes as an operand of a product."""
    if not is_cuda():
        # Triton's interpreter misreads subnormal numbers; bfloat16 has all of E4M3.
        wide = unpack_8bit(codes.to(tl.uint8, bitcast=True), True)
        codes = wide.to(tl.bfloat16)
    return codes


@triton.jit
def sum_parts(
    acc: tensor, parts: tensor, counter: tensor, part: tensor, place: tensor,
    both: tensor, size: tensor, SPLITS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Store the sum of a part; the last program of a tile adds all in order.

    Returns whether this is the last one, and the sum if so.
    """
    tl.store(parts + part * size + place, acc, mask=both)
    finish_stores(False)
    last = tl.atomic_add(counter, 1, sem="acq_rel") % SPLITS == SPLITS - 1
    acc = tl.zeros_like(acc)
    if last:
        for one in tl.static_range(SPLITS):
            at = parts + one * size + place
            acc += tl.load(at, mask=both, other=0, cache_modifier=".cg")
    return last, acc


# A single row is no other kernel, in which Triton loads rows one number at a time.
@triton.jit(do_not_specialize=["tokens"])
def streamed_float8(
    x: tensor, x_scales: tensor, weight: tensor, scales: tensor, bias: tensor,
    y: tensor, parts: tensor, counters: tensor, tokens: tensor, n: tensor, k: tensor,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x`` [tokens, k] with ``weight`` [n, k], or [2 n, k] if ``GATED``.

    Grid: tiles of rows, parts of columns. If there are several parts, their sums are
    stored in ``parts`` [SPLITS, tokens, n], and the last program of a tile adds them in
    order. counters: [tiles], a multiple of ``SPLITS`` between launches. EVEN: whether
    tiles divide the matrix.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    is_row, is_token = row < n, token < tokens
    at = weight + row.to(tl.int64)[:, None] * k + column[None, :]
    up_at = at + n.to(tl.int64) * k
    # Rows of activations beyond the last repeat it, as loads without a mask are faster.
    source = tl.minimum(token, tokens - 1).to(tl.int64)
    x_at = x + source[:, None] * k + column[None, :]
    steps = tl.cdiv(tl.cdiv(k, COLUMNS), SPLITS)
    begin = part * steps * COLUMNS
    if PDL and AHEAD > 0:
        line = begin + tl.arange(0, AHEAD) * LINE
        fetch(weight + row.to(tl.int64)[:, None] * k + line[None, :])
        if GATED:
            fetch(weight + (row + n).to(tl.int64)[:, None] * k + line[None, :])
    pdl_sync(PDL)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    up_acc = acc
    end = tl.minimum(begin + steps * COLUMNS, k)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        columns = start + column
        a = load_codes(x_at + start, token >= 0, columns, k, EVEN)
        a = tl.trans(operand(a))
        w = operand(load_codes(at + start, is_row, columns, k, EVEN))
        acc = tl.dot(w, a, acc)
        if GATED:
            w_up = operand(load_codes(up_at + start, is_row, columns, k, EVEN))
            up_acc = tl.dot(w_up, a, up_acc)
    both = is_token[None, :] & is_row[:, None]
    place = token.to(tl.int64)[None, :] * n + row[:, None]
    if SPLITS > 1:
        last, acc = sum_parts(
            acc, parts, counters + tile, part, place, both, n.to(tl.int64) * tokens,
            SPLITS,
        )  # fmt: skip
        if not last:
            return
    factor = tl.load(x_scales + token, mask=is_token, other=0)[None, :]
    acc *= factor * tl.load(scales + row, mask=is_row, other=0)[:, None]
    if GATED:
        up_acc *= factor * tl.load(scales + n + row, mask=is_row, other=0)[:, None]
        acc = activate_gate(acc, up_acc, SILU)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=is_row, other=0).to(tl.float32)[:, None]
    tl.store(y + place, acc, mask=both)
