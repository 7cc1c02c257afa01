"""Packings of 256 numbers: groups of 16 or 32 whose scales are packed themselves.

A decoder takes uint8 ``blocks`` [count, bytes] and fills float32 ``out``
[count, 256]. A group's scale is one float32 product, as in ggml, so the bits agree.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inl.weights.quant_blocks import FOUR_BIT_VALUES, Bytes, Floats, floats

HALF: Final = 128
"""Numbers whose codes lie in the same bytes, at different bits."""


def q2_k(blocks: Bytes, out: Floats) -> None:
    """Scales and offsets of 4 bits for groups of 16, codes of 2 bits."""
    packed = blocks[:, :16]
    _two_bits(blocks[:, 16:80], out)
    _scale(out, floats(blocks, 80) * (packed & 15), floats(blocks, 82) * (packed >> 4))


def q3_k(blocks: Bytes, out: Floats) -> None:
    """Scales of 6 bits for groups of 16; the third bit of a code lies apart."""
    high, groups = blocks[:, :32], _groups(out, 32)
    _two_bits(blocks[:, 32:96], out)
    for index in range(8):
        groups[:, index] += ((high >> index) & 1) << 2
    out -= 4
    _scale(out, floats(blocks, 108) * _signed_six_bits(blocks[:, 96:108]))


def q4_k(blocks: Bytes, out: Floats) -> None:
    """Scales and offsets of 6 bits for groups of 32, codes of 4 bits."""
    _nibbles(blocks[:, 16:], _groups(out, 32))
    _scale_and_shift(blocks, out)


def q5_k(blocks: Bytes, out: Floats) -> None:
    """As q4_k, with the fifth bits of group ``i`` at bit ``i`` of 32 bytes."""
    high, groups = blocks[:, 16:48], _groups(out, 32)
    _nibbles(blocks[:, 48:], groups)
    for index in range(8):
        groups[:, index] += ((high >> index) & 1) << 4
    _scale_and_shift(blocks, out)


def q6_k(blocks: Bytes, out: Floats) -> None:
    """Scales of 8 bits for groups of 16; codes of 4 and 2 bits, less 32."""
    low = blocks[:, :HALF].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    quarters = out.reshape(-1, 2, 4, 32)
    quarters[:, :, :2] = (low & 15) | (((high >> _shifts(0, 2)) & 3) << 4)
    quarters[:, :, 2:] = (low >> 4) | (((high >> _shifts(4, 6)) & 3) << 4)
    out -= 32
    _scale(out, floats(blocks, 208) * blocks[:, 192:208].view(np.int8))


def iq4_xs(blocks: Bytes, out: Floats) -> None:
    """Scales of 6 bits for groups of 32; a code of 4 bits is a place in a table."""
    groups, codes = _groups(out, 32), blocks[:, 8:].reshape(-1, 8, 16)
    groups[:, :, :16] = FOUR_BIT_VALUES[codes & 15]
    groups[:, :, 16:] = FOUR_BIT_VALUES[codes >> 4]
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = (low.reshape(-1, 8) | high << 4).astype(np.int8) - np.int8(32)
    _scale(out, floats(blocks, 0) * scales)


def tq1_0(blocks: Bytes, out: Floats) -> None:
    """Digits -1, 0 and 1: five to a byte, as the fraction ``byte / 256`` in base 3."""
    start = 0
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        # A byte times a power of 3, modulo 256, brings the next digit to the front.
        powers = np.array([3**place for place in range(digits)], np.uint8)
        turned = blocks[:, None, first:last] * powers[:, None]
        stop = start + turned[0].size
        out[:, start:stop] = (turned.astype(np.uint16) * 3 >> 8).reshape(
            len(blocks), -1
        )
        start = stop
    out -= 1
    out *= floats(blocks, 52)


def tq2_0(blocks: Bytes, out: Floats) -> None:
    """Numbers -1, 0, 1 and 2, two bits each."""
    _two_bits(blocks[:, :64], out)
    out -= 1
    out *= floats(blocks, 64)


def _groups(out: Floats, size: int) -> Floats:
    return out.reshape(len(out), -1, size)


def _shifts(*bits: int) -> NDArray[Any]:
    return np.array(bits, np.uint8)[:, None]


def _two_bits(codes: Bytes, out: Floats) -> None:
    """Each half from 32 bytes: 32 numbers from their lowest two bits, and so on."""
    halves = codes.reshape(-1, 2, 1, 32)
    out.reshape(-1, 2, 4, 32)[:] = (halves >> _shifts(0, 2, 4, 6)) & 3


def _nibbles(codes: Bytes, groups: Floats) -> None:
    """Two groups from 32 bytes: the low halves, then the high ones."""
    pairs = codes.reshape(-1, 4, 32)
    groups[:, 0::2] = pairs & 15
    groups[:, 1::2] = pairs >> 4


def _signed_six_bits(packed: Bytes) -> NDArray[np.int8]:
    """16 scales: four bits each in 8 bytes, two bits each in 4, less 32."""
    low = (packed[:, None, :8] >> _shifts(0, 4) & 15).reshape(-1, 16)
    high = (packed[:, None, 8:] >> _shifts(0, 2, 4, 6) & 3).reshape(-1, 16)
    scales: NDArray[np.int8] = (low | high << 4).astype(np.int8)
    return scales - np.int8(32)


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    """8 scales and 8 offsets of 6 bits in 12 bytes.

    The first four of each are the low bits of bytes 0 to 7; the others have four bits
    in bytes 8 to 11 and their top two in what the first four leave.
    """
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.hstack([first & 63, (rest & 15) | (first >> 6 << 4)])
    offsets = np.hstack([second & 63, (rest >> 4) | (second >> 6 << 4)])
    _scale(out, floats(blocks, 0) * scales, floats(blocks, 2) * offsets)


def _scale(out: Floats, scales: Floats, offsets: Floats | None = None) -> None:
    """Multiply, then take the offset off; both float32 [count, groups]."""
    groups = _groups(out, out.shape[1] // scales.shape[1])
    groups *= scales[:, :, None]
    if offsets is not None:
        groups -= offsets[:, :, None]
