"""Product with packed or plain weights, which are streamed through VMEM.

The grid runs over blocks of outputs, inputs and rows. A block of codes is converted to
the compute dtype in VMEM, some inputs at a time: for few rows on its way to the matrix
unit; for many rows to a buffer, once for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl_jax.pallas import block_sizes
from inl_jax.pallas.packed import (
    CODE8,
    CODE8_SCALE,
    CODES4,
    GROUP,
    LANES,
    WHOLE,
    Packed,
)
from inl_jax.tensors import Array

CHUNK = 1024
"""Inputs that are converted at a time."""

SUBLANES = 16
"""Rows are padded to a multiple of this."""

NAME = "packed_matmul"

FEW_ROWS = 64
"""Most rows for which codes are converted on their way to the matrix unit."""

MANY_ROWS = 512
"""Fewest rows of a shape with many, in the table of block sizes."""

WIDE = 1024
"""Outputs of a block for many rows, where they divide those of the matrix."""

SUMS_BYTES = 16 << 20
"""Most bytes of the sums of all rows, kept between blocks of inputs."""

VMEM_BYTES = 48 << 20
"""Memory that the compiler may use; the smallest of the chips has 64 MiB."""


class Blocks(NamedTuple):
    """Static sizes of one launch."""

    rows: int
    outputs: int
    inputs: int
    """Inputs of a block."""
    parts: int
    """Blocks of inputs."""
    buffered: bool
    """Whether converted codes are kept in a buffer."""


def blocks_of(
    rows: int, inputs: int, outputs: int, most: Mapping[str, int] | None = None
) -> Blocks:
    """Return the block sizes of a shape, by the number of rows and of inputs.

    most: rows and outputs of a block, at most, in place of those of the rule.
    """
    most, few = most or {}, rows <= FEW_ROWS
    parts = 1
    while inputs > parts * WHOLE or inputs % (parts * LANES):
        parts += 1
    # Rows are read again for each block of outputs: bench/tpu_tune.py.
    wide = most.get("outputs", 512 if few or outputs % WIDE else WIDE)
    block = min(rows + -rows % SUBLANES, most.get("rows", 512))
    while parts > 1 and 4 * (rows + -rows % block) * wide > SUMS_BYTES and wide > LANES:
        wide //= 2
    return Blocks(
        rows=block,
        outputs=min(outputs, wide),
        inputs=inputs // parts,
        parts=parts,
        buffered=not few,
    )


def shape_of(rows: int, inputs: int, outputs: int, dtype: Any, offsets: bool) -> str:
    """Name a shape in the table of block sizes; dtype: that of the codes."""
    kind = "few" if rows <= FEW_ROWS else "many" if rows >= MANY_ROWS else "some"
    more = " with offsets" if offsets else ""
    name = "int4" if jnp.dtype(dtype) == CODES4 else jnp.dtype(dtype).name
    return f"{kind} rows, {inputs} to {outputs}, {name}{more}"


def matmul(
    x: Array, w: Packed, bias: Array | None = None, *, interpret: Any = False
) -> Array:
    """Multiply ``x`` [T, K] by a packed matrix [N, K] transposed; returns [T, N]."""
    per_row, outputs = w.per_row, w.codes.shape[1]
    inputs = per_row * w.codes.shape[0]
    name = shape_of(len(x), inputs, outputs, w.codes.dtype, w.offsets is not None)
    if w.codes.dtype == CODE8 and reads_float8():
        w = w._replace(codes=jax.lax.bitcast_convert_type(w.codes, jnp.float8_e4m3fn))
    tokens = x.shape[0]
    most = block_sizes.searched(NAME, name)
    size = blocks_of(tokens, inputs, outputs, most)
    x = jnp.pad(x, ((0, -tokens % size.rows), (0, inputs - x.shape[1])))
    wide = (size.inputs // per_row, size.outputs)
    scale = pl.BlockSpec((size.inputs // GROUP, size.outputs), lambda n, k, _: (k, n))
    operands: list[tuple[Any, Any]] = [
        (x, pl.BlockSpec((size.rows, size.inputs), lambda _, k, m: (m, k))),
        (w.codes, pl.BlockSpec(wide, lambda n, k, _: (k, n))),
        (w.scales, scale),
        (w.offsets, scale),
        (
            None if bias is None else bias[None],
            pl.BlockSpec((1, size.outputs), lambda n, *_: (0, n)),
        ),
    ]
    given = [operand is not None for operand, _ in operands]
    present = [pair for pair in operands if pair[0] is not None]
    summed = len(x) if size.parts > 1 else size.rows
    scratch = [pltpu.VMEM((summed, size.outputs), jnp.float32)]
    if size.buffered:
        scratch.append(pltpu.VMEM((size.inputs, size.outputs), x.dtype))
    pairs = w.codes.dtype == CODES4 and x.dtype == jnp.bfloat16
    if pairs:
        groups = (min(CHUNK, size.inputs) // GROUP, size.outputs)
        given_scales = [each for each in (w.scales, w.offsets) if each is not None]
        scratch += [pltpu.VMEM(groups, jnp.int32) for _ in given_scales]
    out = pl.pallas_call(
        partial(body, size, tuple(given)),
        grid=(pl.cdiv(outputs, size.outputs), size.parts, len(x) // size.rows),
        in_specs=[spec for _, spec in present],
        out_specs=pl.BlockSpec(
            (size.rows, size.outputs),
            # A block is copied to HBM when another follows: after the last inputs.
            lambda n, k, m: (jnp.where(k == size.parts - 1, m, 0), n),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), x.dtype),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * inputs * outputs,
            bytes_accessed=sum(each.nbytes for each, _ in present) + 2 * x.nbytes,
            transcendentals=0,
        ),
        interpret=interpret,
        name=NAME,
    )(*(operand for operand, _ in present))
    return out[:tokens]


def reads_float8() -> bool:
    """Whether the chip converts float8 e4m3 in one instruction."""
    return pltpu.is_tpu_device() and pltpu.get_tpu_info().generation >= 7


def body(size: Blocks, given: tuple[bool, ...], *refs: Any) -> None:
    """One block of outputs, inputs and rows."""
    source = iter(refs)
    operands: list[Any] = [next(source) if each else None for each in given]
    x, codes, scales, offsets, bias = operands
    out, sums, *scratch = source
    buffer, pairs = scratch[: size.buffered], scratch[size.buffered :]
    part, row = pl.program_id(1), pl.program_id(2)
    if size.parts > 1:
        sums = sums.at[pl.ds(pl.multiple_of(row * size.rows, size.rows), size.rows)]

    @pl.when(part == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    def chunk(start: Any, count: int) -> None:
        if pairs:
            values = scaled_in_pairs(codes, scales, offsets, start, count, pairs)
        else:
            values = converted(codes, scales, offsets, start, count, x.dtype)
        if buffer:
            buffer[0][pl.ds(start, count), :] = values
        else:
            sums[...] += product(x[:, pl.ds(start, count)], values)

    if not buffer:
        over_chunks(size.inputs, chunk)
    else:
        pl.when(row == 0)(lambda: over_chunks(size.inputs, chunk))
        sums[...] += product(x[...], buffer[0][...])

    @pl.when(part == size.parts - 1)
    def _() -> None:
        y = sums[...]
        if codes.dtype == CODE8:
            y *= CODE8_SCALE
        if bias is not None:
            y += bias[...].astype(jnp.float32)
        out[...] = y.astype(out.dtype)


def over_chunks(inputs: int, chunk: Any) -> None:
    """Call ``chunk(start, count)`` for the inputs of a block, in order."""
    whole = inputs // CHUNK
    if whole:

        @pl.loop(0, whole)
        def _(index: Any) -> None:
            chunk(pl.multiple_of(index * CHUNK, CHUNK), CHUNK)

    if inputs % CHUNK:
        chunk(whole * CHUNK, inputs % CHUNK)


def rows_of(codes: Any, start: Any, count: int) -> Any:
    """Return the codes of ``count`` inputs from ``start``."""
    if codes.dtype != CODES4:
        return codes[pl.ds(start, count), :]
    first = start // 2
    if not isinstance(start, int):
        first = pl.multiple_of(first, CHUNK // 2)
    return pltpu.bitcast(codes[pl.ds(first, count // 2), :], jnp.int4)


def converted(
    codes: Any, scales: Any, offsets: Any, start: Any, count: int, dtype: Any
) -> Any:
    """Return ``count`` inputs of a block from ``start`` in the compute dtype."""
    values = rows_of(codes, start, count)
    if scales is None:
        return values.astype(dtype)
    outputs = values.shape[1]
    # 4 bits leave no time for arithmetic in float32 between two transfers.
    four = values.dtype == jnp.int4
    middle = dtype if four else jnp.float32
    values = values.astype(middle).reshape(count // GROUP, GROUP, outputs)
    first = start // GROUP
    if not isinstance(start, int):
        first = pl.multiple_of(first, CHUNK // GROUP)
    groups = pl.ds(first, count // GROUP)
    scale = from_half(scales[groups, :])
    values = values * scale.astype(middle)[:, None]
    if offsets is not None:
        offset = from_half(offsets[groups, :]) + (8 * scale if four else 0)
        values = values + offset.astype(middle)[:, None]
    return values.reshape(count, outputs).astype(dtype)


def scaled_in_pairs(
    codes: Any, scales: Any, offsets: Any, start: Any, count: int, pairs: Sequence[Any]
) -> Any:
    """:func:`converted` for 4-bit codes in bfloat16.

    pairs: buffers [groups, outputs] int32 of each scale and offset twice, so that a
    load that repeats a row fills a register of bfloat16.
    """
    first, size = start // GROUP, count // GROUP
    if not isinstance(start, int):
        first = pl.multiple_of(first, CHUNK // GROUP)
    factors = [from_half(scales[pl.ds(first, size), :])]
    if offsets is not None:
        factors.append(from_half(offsets[pl.ds(first, size), :]) + 8 * factors[0])
    for pair, factor in zip(pairs, factors, strict=True):
        pair[pl.ds(0, size), :] = twice(factor)

    def spread(pair: Any, group: int) -> Any:
        tiles = []
        # The rows of several tiles would be loaded into one register and moved.
        for lane in range(0, pair.shape[1], LANES):
            row = pair[pl.ds(group, 1), lane : lane + LANES]
            tiles.append(jnp.broadcast_to(row, (GROUP // 2, row.shape[1])))
        return pltpu.bitcast(jnp.concatenate(tiles, axis=1), jnp.bfloat16)

    values = rows_of(codes, start, count).astype(jnp.bfloat16)
    parts = []
    for group in range(size):
        part = values[group * GROUP : (group + 1) * GROUP]
        scale, *offset = (spread(pair, group) for pair in pairs)
        parts.append(part * scale + offset[0] if offset else part * scale)
    return jnp.concatenate(parts, axis=0)


def twice(x: Any) -> Any:
    """Round float32 to bfloat16, and return its bits in both halves of an int32."""
    bits = jax.lax.bitcast_convert_type(
        x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32
    )
    return bits | jax.lax.shift_right_logical(bits, 16)


def from_half(bits: Any) -> Any:
    """Convert the bits of float16 to float32, without a float16 of the chip."""
    wide = bits.astype(jnp.int32)
    exponent, fraction = (wide >> 10) & 31, wide & 1023
    normal = jax.lax.bitcast_convert_type(
        ((exponent + 112) << 23) | (fraction << 13), jnp.float32
    )
    size = jnp.where(exponent == 0, fraction.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(wide < 0, -size, size)


def product(x: Any, y: Any) -> Any:
    """Multiply in float32, with float32 precision for float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
