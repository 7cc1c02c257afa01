"""Decoders of block formats with 32 elements and one scale.

A decoder reads uint8 ``blocks`` [count, bytes] and writes float32 ``out`` [count, 32].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"

FOUR_BIT_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.int8,
)
"""Values of the codes of iq4_nl and iq4_xs, denser around zero."""

E2M1_DOUBLED: Final = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8
)
"""Values of E2M1 floats (sign, 2 exponent bits, 1 mantissa bit), times two."""


def _e4m3_values() -> Floats:
    """Values of all 256 codes: 4 exponent bits of bias 7, no infinity, NaN at 0x7F."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3: Final = _e4m3_values()
"""Values of float8_e4m3 codes."""
UE4M3: Final = np.tile(E4M3[:128], 2)
"""Values of E4M3 codes whose sign has no meaning, without NaN, as ggml has them."""
UE4M3[[127, 255]] = 0, 480


def float8_e4m3(blocks: Bytes, out: Floats) -> None:
    """Decode single 8-bit floats with 4 exponent bits."""
    out[:] = E4M3[blocks]


def float8_e5m2(blocks: Bytes, out: Floats) -> None:
    """Decode single 8-bit floats with 5 exponent bits: the upper half of float16."""
    out[:] = (blocks.astype(np.uint16) << 8).view(np.float16)


def q8_0(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a scale and 32 signed bytes."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= floats(blocks, 0)


def q4_0(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a scale and 4-bit codes; zero is 8."""
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= floats(blocks, 0)


def q4_1(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a scale, an offset and 4-bit codes."""
    _nibbles(blocks[:, 4:], out)
    out *= floats(blocks, 0)
    out += floats(blocks, 2)


def q5_0(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a scale, the fifth bits and the low 4 bits; zero is 16."""
    _nibbles(blocks[:, 6:], out)
    out += _fifth_bits(blocks[:, 2:6])
    out -= 16
    out *= floats(blocks, 0)


def q5_1(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a scale, an offset, the fifth bits and the low 4 bits."""
    _nibbles(blocks[:, 8:], out)
    out += _fifth_bits(blocks[:, 4:8])
    out *= floats(blocks, 0)
    out += floats(blocks, 2)


def iq4_nl(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a scale and 4-bit indices into :data:`FOUR_BIT_VALUES`."""
    _look_up(FOUR_BIT_VALUES, blocks[:, 2:], out)
    out *= floats(blocks, 0)


def float8_e8m0(blocks: Bytes, out: Floats) -> None:
    """Decode exponents (OCP Microscaling, v1.0): 2 to the power of code - 127; 255 is
    NaN.
    """
    out[:] = np.ldexp(np.float32(1), blocks.astype(np.int32) - 127)
    out[blocks == 255] = np.nan


def mxfp4(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of an exponent and 32 E2M1 floats (OCP Microscaling, v1.0)."""
    _look_up(E2M1_DOUBLED, blocks[:, 1:], out)
    # Exact: a power of two, subnormal for the two least exponents.
    out *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


def mxfp8(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of an exponent and 32 E4M3 floats (OCP Microscaling, v1.0)."""
    out[:] = E4M3[blocks[:, 1:]]
    out *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)


def nvfp4(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of four E4M3 scales without a sign, each of 16 E2M1 floats."""
    scales = UE4M3[blocks[:, :4]]
    codes = blocks[:, 4:].reshape(-1, 4, 8)
    parts = out.reshape(-1, 4, 16)
    parts[:, :, :8] = E2M1_DOUBLED[codes & 15]
    parts[:, :, 8:] = E2M1_DOUBLED[codes >> 4]
    parts *= scales[:, :, None] * np.float32(0.5)


def fp8_128(blocks: Bytes, out: Floats) -> None:
    """Decode blocks of a float32 scale and 128 E4M3 floats."""
    out[:] = E4M3[blocks[:, 4:]]
    out *= np.ascontiguousarray(blocks[:, :4]).view("<f4")


def floats(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte ``at`` of each block, as float32 [count, 1]."""
    bits = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return bits.astype(np.float32)


def _nibbles(codes: Bytes, out: Floats) -> None:
    """Unpack 4-bit codes: first the low halves of all bytes, then the high ones."""
    out[:, :16] = codes & 15
    out[:, 16:] = codes >> 4


def _look_up(table: NDArray[np.int8], codes: Bytes, out: Floats) -> None:
    out[:, :16] = table[codes & 15]
    out[:, 16:] = table[codes >> 4]


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpack 32 bits from 4 bytes, lowest first, each of value 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)
