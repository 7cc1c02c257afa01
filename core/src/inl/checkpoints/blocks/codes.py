"""Quantized matrices as codes and scales, without loss: what packed kernels read."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from inl.checkpoints.blocks.dtypes import BLOCK_DTYPES
from inl.dtypes import HostArray

SPLIT: Final = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
"""Formats that can be split into codes and one scale per 32 of them."""

FLOAT8_BLOCKS: Final = "mxfp8"
"""Format of 8-bit floats with a power of two for 32 of them."""

FLOAT8_SCALED: Final = "fp8_128"
"""Format of 8-bit floats with a float32 for 128 of them."""

FLOAT4_BLOCKS: Final = "mxfp4"
"""Format of 4-bit floats with a power of two for 32 of them."""


def split_blocks(array: HostArray) -> tuple[Any, Any, Any]:
    """Split a stored matrix [N, K] of :data:`SPLIT` into codes, scales and offsets.

    Codes are int8 [N, K], or uint8 [N, K / 2] for 4 bits: of each 32, the first 16 are
    the low halves of 16 bytes, and 8 is subtracted if there are no offsets. Scales and
    offsets are float16 [N, K / 32]; offsets are ``None`` for symmetric formats.
    """
    kind = BLOCK_DTYPES[array.dtype]
    rows, columns = array.shape
    blocks = array.data.reshape(rows, columns // kind.block, kind.bytes)
    header_values = 1 if kind.symmetric else 2
    heads = np.ascontiguousarray(blocks[:, :, : 2 * header_values]).view(np.float16)
    scales = np.ascontiguousarray(heads[:, :, 0])
    offsets = None if kind.symmetric else np.ascontiguousarray(heads[:, :, 1])
    body = np.ascontiguousarray(blocks[:, :, 2 * header_values :])
    if kind.bits == 8:
        return body.view(np.int8).reshape(rows, columns), scales, offsets
    if kind.bits == 4:
        return body.reshape(rows, columns // 2), scales, offsets
    fifth = np.unpackbits(body[:, :, :4], axis=-1, bitorder="little")
    low = np.concatenate([body[:, :, 4:] & 15, body[:, :, 4:] >> 4], -1)
    codes = (low | fifth << 4).astype(np.int8) - np.int8(kind.zero)
    return codes.reshape(rows, columns), scales, offsets


def split_float8(array: HostArray) -> tuple[Any, Any]:
    """Split a stored matrix [N, K] of :data:`FLOAT8_BLOCKS` into codes and scales.

    Codes are the bits of E4M3, uint8 [N, K]; scales the bits of bfloat16, which stores
    every power of two of E8M0 exactly, uint16 [N, K / 32].
    """
    rows, columns = array.shape
    kind = BLOCK_DTYPES[array.dtype]
    blocks = array.data.reshape(rows, columns // kind.block, kind.bytes)
    exponents = blocks[:, :, 0].astype(np.uint16)
    scales = np.where(exponents == 0, np.uint16(0x40), exponents << 7)  # 0: subnormal
    return np.ascontiguousarray(blocks[:, :, 1:]).reshape(rows, columns), scales


def split_float4(array: HostArray) -> tuple[Any, Any]:
    """Split a stored matrix [N, K] of :data:`FLOAT4_BLOCKS` into codes and exponents.

    Codes are the bits of E2M1, uint8 [N, K / 2], in the order of :func:`split_blocks`;
    exponents are uint8 [N, K / 32]: ``e`` is the power of two of ``e - 127``.
    """
    rows, columns = array.shape
    kind = BLOCK_DTYPES[array.dtype]
    blocks = array.data.reshape(rows, columns // kind.block, kind.bytes)
    codes = np.ascontiguousarray(blocks[:, :, 1:]).reshape(rows, columns // 2)
    return codes, np.ascontiguousarray(blocks[:, :, 0])


def split_scaled_float8(array: HostArray) -> tuple[Any, Any]:
    """Split a stored matrix [N, K] of :data:`FLOAT8_SCALED` into codes and scales.

    Codes are the bits of E4M3, uint8 [N, K]; scales are float32 [N, K / 128].
    """
    rows, columns = array.shape
    kind = BLOCK_DTYPES[array.dtype]
    blocks = array.data.reshape(rows, columns // kind.block, kind.bytes)
    scales = np.ascontiguousarray(blocks[:, :, :4]).view(np.float32)[:, :, 0]
    return np.ascontiguousarray(blocks[:, :, 4:]).reshape(rows, columns), scales


def unpack_nibbles(codes: Any) -> Any:
    """Return the 4-bit codes of :func:`split_blocks` as uint8 [N, K], 0 to 15."""
    rows = codes.shape[0]
    halves = codes.reshape(rows, -1, 1, 16)
    return np.concatenate([halves & 15, halves >> 4], 2).reshape(rows, -1)
