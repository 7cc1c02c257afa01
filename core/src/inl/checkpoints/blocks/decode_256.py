"""Decoders of block formats with 256 elements in groups whose scales are quantized.

A decoder reads uint8 ``blocks`` [count, bytes] and writes float32 ``out``
[count, 256]. A group's scale is one float32 product, as in ggml, so results are
bitwise equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.blocks.decode_32 import FOUR_BIT_VALUES, Bytes, Floats, floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

HALF: Final = 128
"""Elements whose codes share bytes, at different bits."""


def q2_k(blocks: Bytes, out: Floats) -> None:
    """Decode 2-bit codes; 4-bit scales and offsets per group of 16."""
    packed = blocks[:, :16]
    _two_bits(blocks[:, 16:80], out)
    _scale(out, floats(blocks, 80) * (packed & 15), floats(blocks, 82) * (packed >> 4))


def q3_k(blocks: Bytes, out: Floats) -> None:
    """Decode 3-bit codes (high bits apart); 6-bit scales per group of 16."""
    high, groups = blocks[:, :32], _groups(out, 32)
    _two_bits(blocks[:, 32:96], out)
    for index in range(8):
        groups[:, index] += ((high >> index) & 1) << 2
    out -= 4
    _scale(out, floats(blocks, 108) * _signed_six_bits(blocks[:, 96:108]))


def q4_k(blocks: Bytes, out: Floats) -> None:
    """Decode 4-bit codes; 6-bit scales and offsets per group of 32."""
    _nibbles(blocks[:, 16:], _groups(out, 32))
    _scale_and_shift(blocks, out)


def q5_k(blocks: Bytes, out: Floats) -> None:
    """Decode as q4_k, with the fifth bits of group ``i`` at bit ``i`` of 32 bytes."""
    high, groups = blocks[:, 16:48], _groups(out, 32)
    _nibbles(blocks[:, 48:], groups)
    for index in range(8):
        groups[:, index] += ((high >> index) & 1) << 4
    _scale_and_shift(blocks, out)


def q6_k(blocks: Bytes, out: Floats) -> None:
    """Decode 6-bit codes (high 2 bits apart); 8-bit scales per group of 16."""
    low = blocks[:, :HALF].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    quarters = out.reshape(-1, 2, 4, 32)
    quarters[:, :, :2] = (low & 15) | (((high >> _shifts(0, 2)) & 3) << 4)
    quarters[:, :, 2:] = (low >> 4) | (((high >> _shifts(4, 6)) & 3) << 4)
    out -= 32
    _scale(out, floats(blocks, 208) * blocks[:, 192:208].view(np.int8))


def iq4_xs(blocks: Bytes, out: Floats) -> None:
    """Decode 4-bit indices into a table; 6-bit scales per group of 32."""
    groups, codes = _groups(out, 32), blocks[:, 8:].reshape(-1, 8, 16)
    groups[:, :, :16] = FOUR_BIT_VALUES[codes & 15]
    groups[:, :, 16:] = FOUR_BIT_VALUES[codes >> 4]
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = (low.reshape(-1, 8) | high << 4).astype(np.int8) - np.int8(32)
    _scale(out, floats(blocks, 0) * scales)


def tq1_0(blocks: Bytes, out: Floats) -> None:
    """Decode ternary digits -1, 0, 1: five per byte, ``byte / 256`` in base 3."""
    start = 0
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        # A byte times a power of 3, modulo 256, brings the next digit to the front.
        powers = np.array([3**power for power in range(digits)], np.uint8)
        shifted = blocks[:, None, first:last] * powers[:, None]
        stop = start + shifted[0].size
        decoded = shifted.astype(np.uint16) * 3 >> 8
        out[:, start:stop] = decoded.reshape(len(blocks), -1)
        start = stop
    out -= 1
    out *= floats(blocks, 52)


def tq2_0(blocks: Bytes, out: Floats) -> None:
    """Decode 2-bit codes of -1, 0, 1 and 2; one scale per block."""
    _two_bits(blocks[:, :64], out)
    out -= 1
    out *= floats(blocks, 64)


def _groups(out: Floats, size: int) -> Floats:
    return out.reshape(len(out), -1, size)


def _shifts(*bits: int) -> NDArray[Any]:
    return np.array(bits, np.uint8)[:, None]


def _two_bits(codes: Bytes, out: Floats) -> None:
    """Unpack each half from 32 bytes: 32 codes from the lowest two bits, and so on."""
    halves = codes.reshape(-1, 2, 1, 32)
    out.reshape(-1, 2, 4, 32)[:] = (halves >> _shifts(0, 2, 4, 6)) & 3


def _nibbles(codes: Bytes, groups: Floats) -> None:
    """Unpack two groups from 32 bytes: the low halves, then the high ones."""
    pairs = codes.reshape(-1, 4, 32)
    groups[:, 0::2] = pairs & 15
    groups[:, 1::2] = pairs >> 4


def _signed_six_bits(packed: Bytes) -> NDArray[np.int8]:
    """Unpack 16 scales: 4 low bits in 8 bytes, 2 high bits in 4 bytes; zero is 32."""
    low = (packed[:, None, :8] >> _shifts(0, 4) & 15).reshape(-1, 16)
    high = (packed[:, None, 8:] >> _shifts(0, 2, 4, 6) & 3).reshape(-1, 16)
    scales: NDArray[np.int8] = (low | high << 4).astype(np.int8)
    return scales - np.int8(32)


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    """Apply 8 scales and 8 offsets of 6 bits, packed in 12 bytes.

    The first four of each are the low 6 bits of bytes 0 to 7. The others have their
    low 4 bits in bytes 8 to 11, and their high 2 bits in the top of bytes 0 to 7.
    """
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.hstack([first & 63, (rest & 15) | (first >> 6 << 4)])
    offsets = np.hstack([second & 63, (rest >> 4) | (second >> 6 << 4)])
    _scale(out, floats(blocks, 0) * scales, floats(blocks, 2) * offsets)


def _scale(out: Floats, scales: Floats, offsets: Floats | None = None) -> None:
    """Multiply by scales and subtract offsets, both float32 [count, groups]."""
    groups = _groups(out, out.shape[1] // scales.shape[1])
    groups *= scales[:, :, None]
    if offsets is not None:
        groups -= offsets[:, :, None]
