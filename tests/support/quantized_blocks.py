"""Blocks of quantized weights decoded in float64, by the arithmetic of each format."""

from __future__ import annotations

import math

import numpy as np

from inl.dtypes import HostArray


def e4m3_values():
    """Values of the 256 codes: OCP 8-bit Floating Point, v1.0; NaN is left out."""
    values = np.full(256, np.nan)
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        if (exponent, mantissa) == (15, 7):
            continue
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8)
        values[code] = sign * size * (1.0 if exponent == 0 else 2.0 ** (exponent - 7))
    return values


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Values of the codes without a sign: OCP Microscaling, v1.0."""

SIZES = {
    "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "mxfp4": 17,
    "mxfp8": 33,
}  # fmt: skip
"""Bytes of a block of 32."""


def decoded(array):
    """float64 values of a HostArray of blocks in one of SIZES."""
    blocks = array.data.reshape(-1, SIZES[array.dtype])
    if array.dtype.startswith("mxfp"):
        scale = 2.0 ** (blocks[:, :1].astype(np.float64) - 127)
        if array.dtype == "mxfp8":
            values = e4m3_values()[blocks[:, 1:]] * scale
        else:
            codes = nibbles(blocks[:, 1:])
            values = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * scale
    elif array.dtype == "q8_0":
        values = blocks[:, 2:].view(np.int8) * halves(blocks, 0)
    else:
        bits, has_offset = int(array.dtype[1]), array.dtype.endswith("_1")
        codes = nibbles(blocks[:, -16:]).astype(np.int64)
        if bits == 5:
            high = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
            codes += 16 * high
        zero = 0 if has_offset else 2 ** (bits - 1)
        values = (codes - zero) * halves(blocks, 0)
        values = values + halves(blocks, 2) if has_offset else values
    return values.reshape(array.shape)


def nibbles(codes):
    """Codes of 4 bits: the low halves of all bytes, then the high ones."""
    return np.concatenate([codes & 15, codes >> 4], 1)


def halves(blocks, at):
    """The float16 at a byte of each block, in float64."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float64)


def random_blocks(rng, kind, shape):
    """A HostArray of random codes, whose values bfloat16 holds exactly."""
    count = math.prod(shape) // 32
    blocks = rng.integers(0, 256, (count, SIZES[kind]), np.uint8)
    if kind.startswith("mxfp"):
        blocks[:, 0] = rng.integers(119, 124, count)
        if kind == "mxfp8":  # no NaN, and no values far above the others
            blocks[:, 1:] &= 0xBF
    else:
        scales = 2.0 ** rng.integers(-7, -4, count)
        heads = [scales, -scales * rng.integers(4, 12, count)]
        for number, head in enumerate(heads[: 1 + kind.endswith("_1")]):
            at = 2 * number
            blocks[:, at : at + 2] = head.astype("<f2")[:, None].view(np.uint8)
    data = blocks.reshape(*shape[:-1], -1)
    return HostArray(data, kind, tuple(shape))
