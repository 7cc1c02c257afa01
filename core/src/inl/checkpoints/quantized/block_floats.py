"""Matrices of small floats in blocks: NVFP4, MXFP4 and MXFP8.

A byte of 4-bit codes stores two neighboring E2M1 floats, the first in the low half.
MXFP4 and MXFP8 (OCP Microscaling, v1.0) have a power of two for 32 columns, NVFP4 an
E4M3 scale for 16 and a float32 factor for the whole matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from inl.checkpoints.blocks.codes import FLOAT8_BLOCKS
from inl.checkpoints.blocks.decode_32 import E2M1_DOUBLED
from inl.checkpoints.quantized.matrix import BLOCK, QuantMatrix
from inl.checkpoints.quantized.matrix_format import Parts, Shape
from inl.dtypes import E4M3, E8M0, HostArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

NVFP4, MXFP4, MXFP8 = "nvfp4", "mxfp4", FLOAT8_BLOCKS
"""Kinds of blocks; the last two are also dtypes of kernels."""
NVFP4_WIDTH: Final = 16
"""Columns that share a scale of NVFP4."""
POWERS: Final = ("uint8", E8M0)
"""Dtypes of exponents: of 2, with a bias of 127."""
NOT_A_NUMBER: Final = 255
"""Exponent that stands for NaN."""


def block_kind(parts: Parts, codes: str, scale: str) -> str | None:
    """Return the kind of blocks of a matrix, ``None`` for any other format.

    codes, scale: names of its parts.
    """
    if not parts.has(codes) or not parts.has(scale):
        return None
    powers = parts.dtype(scale) in POWERS
    if parts.dtype(codes) == "uint8":
        return MXFP4 if powers else NVFP4 if parts.dtype(scale) == E4M3 else None
    found = parts.shape(codes)
    whole = len(found) == 2 and parts.shape(scale) == (found[0], found[1] // BLOCK)
    return MXFP8 if powers and whole and parts.dtype(codes) == E4M3 else None


def check_blocks(parts: Parts, kind: str, codes: str, scale: str, factor: str) -> Shape:
    """Check the tensors of a matrix; return its shape [N, K].

    factor: name of the part with the factor of NVFP4. Raises
    :class:`~inl.errors.CheckpointError`.
    """
    stored = parts.shape(codes)
    if len(stored) != 2:
        parts.refuse(codes, f"shape {list(stored)}", "2 axes")
    shape = stored if kind == MXFP8 else (stored[0], 2 * stored[1])
    width = NVFP4_WIDTH if kind == NVFP4 else BLOCK
    if not shape[1] or shape[1] % width:
        parts.refuse(codes, f"rows of {shape[1]}", f"rows of a multiple of {width}")
    parts.check(scale, (shape[0], shape[1] // width))
    if kind == NVFP4:
        parts.check(factor, (), (1,), (1, 1), dtypes=("float32",))
    return shape


def packed_blocks(parts: Parts, kind: str, codes: str, scale: str) -> HostArray:
    """Read a matrix of MXFP4 or MXFP8 in the blocks of that dtype."""
    stored = parts.integers(codes).view(np.uint8)
    powers = parts.integers(scale).view(np.uint8)
    if powers.size and powers.max() == NOT_A_NUMBER:
        parts.refuse(scale, f"the exponent {NOT_A_NUMBER}, NaN", "0 to 254")
    rows, blocks = powers.shape
    size = blocks * BLOCK
    if kind == MXFP8:
        if ((stored & 127) == 127).any():
            parts.refuse(codes, "NaN", "finite numbers")
        body = stored.reshape(rows, blocks, BLOCK)
    else:
        nibbles = neighbors(stored).reshape(rows, blocks, BLOCK)
        body = np.bitwise_or(nibbles[..., :16], nibbles[..., 16:] << np.uint8(4))
    data = np.concatenate([powers[..., None], body], -1).reshape(rows, -1)
    return HostArray(data, kind, (rows, size))


def nvfp4_matrix(parts: Parts, codes: str, scale: str, factor: float) -> QuantMatrix:
    """Read a matrix of NVFP4; ``factor`` multiplies all of its scales."""
    doubled = E2M1_DOUBLED[neighbors(parts.integers(codes))]
    scales = parts.floats(scale) * np.float32(factor / 2)
    if not np.isfinite(scales).all():
        parts.refuse(scale, "scales beyond float32", "finite numbers")
    return QuantMatrix(doubled, scales, None, 1, None, NVFP4_WIDTH)


def neighbors(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack bytes [..., K / 2] of two 4-bit codes, the first in the low half."""
    codes = np.stack([packed & 15, packed >> 4], -1)
    return codes.reshape(*packed.shape[:-1], -1)
