"""Triton kernels of products with packed matrices of experts.

See :mod:`inl_torch.triton.moe.packed` for the formats. Few slots multiply in float32,
with exact weights. Tiles of many slots dequantize to the dtype of the inputs for the
matrix units; weights are the first operand, which is read from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.moe.kernels import find_tile
from inl_torch.triton.quantized.kernels import BYTES, unit_dot, unpack_codes


@triton.jit
def unpack_float4(b: tensor) -> tuple[tensor, tensor]:
    """Convert low and high codes of 4-bit floats (E2M1) to float32, exactly.

    The bits of a code are those of a float32 that is too small by a power of two.
    """
    wide = b.to(tl.int32)
    low = ((wide & 8) << 28) | ((wide & 7) << 22)
    high = ((wide & 128) << 24) | ((wide & 112) << 18)
    low = low.to(tl.float32, bitcast=True) * 8.507059173023462e37
    high = high.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return low, high


@triton.jit
def load_factors(scales: tensor, at: tensor, mask: tensor) -> tensor:
    """Load scales or offsets as float32; bytes are exponents of powers of two."""
    values = tl.load(scales + at, mask=mask, other=0)
    if scales.dtype.element_ty == tl.uint8:
        bits = values.to(tl.int32) << 23
        # The least exponent is that of a subnormal number.
        values = tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def load_units(
    codes: tensor, scales: tensor, offsets: tensor, lines: tensor, unit: tensor,
    mask: tensor, ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Load codes [rows, units, 16], scales and offsets [rows, units]; 0 where masked.

    lines: rows of the matrices of all experts, [rows, units] or [rows, 1].
    """
    at = (lines * ROW_UNITS + unit[None, :])[:, :, None] * BYTES
    at += tl.arange(0, BYTES)[None, None, :]
    b = tl.load(codes + at, mask=mask[:, :, None], other=0)
    at = lines * GROUPS + (unit // (ROW_UNITS // GROUPS))[None, :]
    scale = load_factors(scales, at, mask)
    offset = scale
    if OFFSET:
        offset = load_factors(offsets, at, mask)
    return b, scale, offset


@triton.jit
def dot_units(
    b: tensor, scale: tensor, offset: tensor, low: tensor, high: tensor,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
) -> tensor:  # fmt: skip
    """Partial dot product of each unit: float32 [rows, units]."""
    if BITS == 4 and FLOAT:
        first, second = unpack_float4(b)
        product = tl.sum(first * low[None, :, :] + second * high[None, :, :], 2) * scale
    else:
        product = unit_dot(
            b, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT
        )
    return product


@triton.jit
def packed_slots(
    x: tensor, ids: tensor, shares: tensor, codes: tensor, scales: tensor,
    offsets: tensor, up_codes: tensor, up_scales: tensor, up_offsets: tensor, y: tensor,
    repeated: tensor, N: tl.constexpr, ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SUMMED: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum of the products of ``SUMMED`` slots with the matrices of their experts.

    The rows of the matrices are read as one of ``SUMMED * ROW_UNITS`` units. WEIGHTED:
    whether slots are multiplied by ``shares``. ``repeated`` slots share a row of ``x``.
    EXPERTS: number of matrices if ids may be of others, whose slots have zeros; or 0.
    """
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    K: tl.constexpr = ROW_UNITS * PER_UNIT
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    result_row = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    acc = tl.zeros((ROWS, UNITS), tl.float32)
    up_acc = tl.zeros((ROWS, UNITS), tl.float32)
    for start in range(0, SUMMED * ROW_UNITS, UNITS):
        at = start + tl.arange(0, UNITS)
        valid = at < SUMMED * ROW_UNITS
        slot, unit = result_row * SUMMED + at // ROW_UNITS, at % ROW_UNITS
        expert = tl.load(ids + slot, mask=valid, other=0).to(tl.int64)
        if EXPERTS:
            valid &= (expert >= 0) & (expert < EXPERTS)
        lines = expert[None, :] * N + rows[:, None]
        mask = (rows < N)[:, None] & valid[None, :]
        b, scale, offset = load_units(
            codes, scales, offsets, lines, unit, mask, ROW_UNITS, GROUPS, OFFSET
        )
        pointers = x + ((slot // repeated) * K + unit * PER_UNIT)[:, None]
        pointers += tl.arange(0, BYTES)[None, :]
        low = tl.load(pointers, mask=valid[:, None], other=0).to(tl.float32)
        high = low
        if BITS == 4:
            high = tl.load(pointers + BYTES, mask=valid[:, None], other=0)
            high = high.to(tl.float32)
        if WEIGHTED:
            share = tl.load(shares + slot, mask=valid, other=0)[:, None]
            low *= share
            high *= share
        acc += dot_units(b, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT)
        if GATED:
            b, scale, offset = load_units(
                up_codes, up_scales, up_offsets, lines, unit, mask, ROW_UNITS, GROUPS,
                OFFSET,
            )  # fmt: skip
            up_acc += dot_units(
                b, scale, offset, low, high, BITS, FLOAT, ZERO, OFFSET, EXACT
            )
    result = tl.sum(acc, 1)
    if GATED:
        result = activate_gate(result, tl.sum(up_acc, 1), SILU)
    tl.store(y + result_row * N + rows, result, mask=rows < N)


@triton.jit
def dequantized_units(
    codes: tensor, scales: tensor, offsets: tensor, lines: tensor, unit: tensor,
    mask: tensor, half: tl.constexpr, ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Weights [ROWS, COLUMNS] of the low and of the high codes of units."""
    b, scale, offset = load_units(
        codes, scales, offsets, lines, unit, mask, ROW_UNITS, GROUPS, OFFSET
    )
    if BITS == 4 and FLOAT:
        low, high = unpack_float4(b)
    else:
        low, high = unpack_codes(b, BITS, FLOAT, ZERO)
    low *= scale[:, :, None]
    high *= scale[:, :, None]
    if OFFSET:
        low += offset[:, :, None]
        high += offset[:, :, None]
    return low.to(half).reshape(ROWS, COLUMNS), high.to(half).reshape(ROWS, COLUMNS)


@triton.jit
def packed_tile(
    x: tensor, order: tensor, counts: tensor, codes: tensor, scales: tensor,
    offsets: tensor, up_codes: tensor, up_scales: tensor, up_offsets: tensor, y: tensor,
    repeated: tensor, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, N: tl.constexpr,
    ROW_UNITS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, GATHERS: tl.constexpr, SCATTERS: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
) -> None:  # fmt: skip
    """:func:`~inl_torch.triton.moe.kernels.tile_product` with packed matrices."""
    half: tl.constexpr = x.dtype.element_ty
    PER_UNIT: tl.constexpr = BYTES * 8 // BITS
    COLUMNS: tl.constexpr = UNITS * BYTES
    K: tl.constexpr = ROW_UNITS * PER_UNIT
    expert, sorted_index, valid = find_tile(counts, EXPERTS, EXPERTS_P, SLOTS)
    if expert < EXPERTS:
        slot = tl.load(order + sorted_index, mask=valid, other=0).to(tl.int64)
        source = sorted_index
        if GATHERS:
            source = slot // repeated
        rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        lines = (expert.to(tl.int64) * N + rows)[:, None]
        byte = tl.arange(0, COLUMNS)
        column = byte // BYTES * PER_UNIT + byte % BYTES
        pointers = x + source[None, :] * K + column[:, None]
        acc = tl.zeros((ROWS, SLOTS), tl.float32)
        up_acc = tl.zeros((ROWS, SLOTS), tl.float32)
        for start in range(0, ROW_UNITS, UNITS):
            unit = start + tl.arange(0, UNITS)
            mask = (rows < N)[:, None] & (unit < ROW_UNITS)[None, :]
            inside = (start + byte // BYTES < ROW_UNITS)[:, None] & valid[None, :]
            a = tl.load(pointers + start * PER_UNIT, mask=inside, other=0)
            c = a
            if BITS == 4:
                c = tl.load(pointers + (start * PER_UNIT + BYTES), mask=inside, other=0)
            low, high = dequantized_units(
                codes, scales, offsets, lines, unit, mask, half, ROW_UNITS, GROUPS,
                BITS, FLOAT, ZERO, OFFSET, ROWS, COLUMNS,
            )  # fmt: skip
            acc = tl.dot(low, a, acc, input_precision="ieee")
            if BITS == 4:
                acc = tl.dot(high, c, acc, input_precision="ieee")
            if GATED:
                low, high = dequantized_units(
                    up_codes, up_scales, up_offsets, lines, unit, mask, half, ROW_UNITS,
                    GROUPS, BITS, FLOAT, ZERO, OFFSET, ROWS, COLUMNS,
                )  # fmt: skip
                up_acc = tl.dot(low, a, up_acc, input_precision="ieee")
                if BITS == 4:
                    up_acc = tl.dot(high, c, up_acc, input_precision="ieee")
        if GATED:
            acc = activate_gate(acc, up_acc, SILU)
        target = sorted_index
        if SCATTERS:
            target = slot
        outputs = y + target[None, :] * N + rows[:, None]
        tl.store(outputs, acc, mask=(rows < N)[:, None] & valid[None, :])
