"""Blocks of quantized weights decoded in float64, by the arithmetic of each format."""

from __future__ import annotations

import numpy as np


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


def decoded(array):
    """float64 values of a HostArray in q8_0, q4_1 or mxfp8."""
    size = {"q8_0": 34, "q4_1": 20, "mxfp8": 33}[array.dtype]
    blocks = array.data.reshape(-1, size)
    if array.dtype == "mxfp8":
        scale = 2.0 ** (blocks[:, :1].astype(np.float64) - 127)
        values = e4m3_values()[blocks[:, 1:]] * scale
    elif array.dtype == "q8_0":
        scale = blocks[:, :2].copy().view("<f2").astype(np.float64)
        values = blocks[:, 2:].view(np.int8) * scale
    else:
        head = blocks[:, :4].copy().view("<f2").astype(np.float64)
        codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
        values = codes * head[:, :1] + head[:, 1:]
    return values.reshape(array.shape)
