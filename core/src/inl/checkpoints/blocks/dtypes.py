"""Block-quantized dtypes: descriptions, sizes and dequantization to float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from inl.checkpoints.blocks import decode_32, decode_256
from inl.checkpoints.blocks.codebooks import FALLBACK_DTYPES, fallback_decoder
from inl.checkpoints.blocks.decode_32 import Bytes, Floats
from inl.dtypes import E8M0, FLOAT8, SIZES, HostArray, cast, widen
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK: Final = 1 << 17
"""Elements decoded per call: as float32 they fit in a core's cache."""

PIECE: Final = 1 << 20
"""Elements converted per step, which bounds the temporary memory of a conversion."""


@dataclass(frozen=True, slots=True)
class BlockDtype:
    """A block-quantized dtype: ``value = scale * (code - zero) + offset``.

    ``group`` codes share a scale, and an offset unless ``symmetric``. A block is the
    unit of storage: groups, their scales, and the scale of the scales.
    """

    bits: int
    """Bits of a code."""
    group: int
    """Codes that share a scale."""
    bytes: int
    """Total bytes of a block."""
    zero: int = 0
    """Stored code of zero, subtracted before scaling."""
    symmetric: bool = True
    """Whether groups have no offset."""
    scale: str = "float16"
    """Dtype of a group's scale and offset; integers are scaled by a float16."""
    block: int = 32
    """Codes of a block."""
    table: bool = False
    """Whether a code is an index into a table of values."""


def _super(
    bits: int, group: int, size: int, scale: str, zero: int = 0, **options: bool
) -> BlockDtype:
    return BlockDtype(bits, group, size, zero, scale=scale, block=256, **options)


BLOCK_DTYPES: Final = {
    "q8_0": BlockDtype(8, 32, 34),
    "q4_0": BlockDtype(4, 32, 18, zero=8),
    "q4_1": BlockDtype(4, 32, 20, symmetric=False),
    "q5_0": BlockDtype(5, 32, 22, zero=16),
    "q5_1": BlockDtype(5, 32, 24, symmetric=False),
    "q2_k": _super(2, 16, 84, "uint4", symmetric=False),
    "q3_k": _super(3, 16, 110, "int6", zero=4),
    "q4_k": _super(4, 32, 144, "uint6", symmetric=False),
    "q5_k": _super(5, 32, 176, "uint6", symmetric=False),
    "q6_k": _super(6, 16, 210, "int8", zero=32),
    "iq4_nl": BlockDtype(4, 32, 18, table=True),
    "iq4_xs": _super(4, 32, 136, "int6", table=True),
    "tq1_0": _super(2, 256, 54, "float16", zero=1),
    "tq2_0": _super(2, 256, 66, "float16", zero=1),
    "mxfp4": BlockDtype(4, 32, 17, scale="float8_e8m0", table=True),
    "mxfp8": BlockDtype(8, 32, 33, scale="float8_e8m0", table=True),
    "fp8_128": BlockDtype(8, 128, 132, scale="float32", block=128, table=True),
}
"""Quantized dtypes with a decoder in this package."""

BLOCKS: Final = {
    **dict.fromkeys((*FLOAT8, E8M0), (1, 1)),
    **{name: (one.block, one.bytes) for name, one in BLOCK_DTYPES.items()},
    "nvfp4": (64, 36),
    "q1_0": (128, 18),
    "q8_1": (32, 40),
    "q8_k": (256, 292),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
}
"""Elements and bytes of a block, for every quantized dtype in files."""

_DECODERS: Final[dict[str, Callable[[Bytes, Floats], None]]] = {
    "float8_e4m3": decode_32.float8_e4m3,
    "float8_e5m2": decode_32.float8_e5m2,
    E8M0: decode_32.float8_e8m0,
    "q8_0": decode_32.q8_0,
    "q4_0": decode_32.q4_0,
    "q4_1": decode_32.q4_1,
    "q5_0": decode_32.q5_0,
    "q5_1": decode_32.q5_1,
    "iq4_nl": decode_32.iq4_nl,
    "mxfp4": decode_32.mxfp4,
    "mxfp8": decode_32.mxfp8,
    "nvfp4": decode_32.nvfp4,
    "fp8_128": decode_32.fp8_128,
    "q2_k": decode_256.q2_k,
    "q3_k": decode_256.q3_k,
    "q4_k": decode_256.q4_k,
    "q5_k": decode_256.q5_k,
    "q6_k": decode_256.q6_k,
    "iq4_xs": decode_256.iq4_xs,
    "tq1_0": decode_256.tq1_0,
    "tq2_0": decode_256.tq2_0,
}


def packed_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor; blocks run along its last axis.

    Raises :class:`CheckpointError` for an unknown dtype, or if a row is not a whole
    number of blocks.
    """
    if dtype in SIZES:
        return math.prod(shape) * SIZES[dtype]
    if dtype not in BLOCKS:
        raise CheckpointError(
            f"dtype: found {dtype!r}; accepted: {', '.join((*SIZES, *BLOCKS))}"
        )
    elements, size = BLOCKS[dtype]
    if not shape or shape[-1] % elements:
        raise CheckpointError(
            f"shape: found {list(shape)} for {dtype}; "
            f"accepted: a last axis in multiples of {elements}"
        )
    return math.prod(shape) // elements * size


def decoder(dtype: str, name: str = "a tensor") -> Callable[[Bytes, Floats], None]:
    """Return the block decoder of a quantized dtype; ``name`` is for the message.

    Raises :class:`CheckpointError` for a dtype without a decoder.
    """
    if dtype in FALLBACK_DTYPES:
        return fallback_decoder(dtype, name)
    if dtype not in _DECODERS:
        raise CheckpointError(
            f"tensor {name!r}: dtype: found {dtype}; "
            f"accepted: {', '.join((*SIZES, *_DECODERS, *FALLBACK_DTYPES))}"
        )
    return _DECODERS[dtype]


def dequantize(array: HostArray, name: str = "a tensor") -> NDArray[np.float32]:
    """Decode to float32 of ``array.shape``; ``name`` is for the message.

    Bitwise equal to ggml: one float32 product and one sum per element. Plain dtypes
    are widened. Raises :class:`CheckpointError` for a dtype without a decoder.
    """
    if array.dtype in SIZES:
        return np.asarray(widen(array), np.float32)
    decode = decoder(array.dtype, name)
    elements, size = BLOCKS[array.dtype]
    blocks = array.data.reshape(-1, size)
    out = np.empty((len(blocks), elements), np.float32)
    # Infinite or NaN scales give such values, without a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        step = CHUNK // elements
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(array.shape)


def convert(array: HostArray, dtype: str, name: str = "a tensor") -> HostArray:
    """Convert to a plain dtype, decoding and rounding PIECE elements at a time.

    Returns ``array`` itself if it has that dtype, else a new read-only array, which a
    backend may use without a copy. Raises as :func:`dequantize` does.
    """
    if array.dtype == dtype:
        return array
    stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    out = np.empty(array.size, stored)
    elements, size = BLOCKS.get(array.dtype, (1, 1))
    units = array.data.reshape(-1, size) if size > 1 else array.data.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, array.size, PIECE):
            stop = min(start + PIECE, array.size)
            data = units[start // elements : stop // elements]
            piece = HostArray(data, array.dtype, (stop - start,))
            out[start:stop] = cast(dequantize(piece, name), dtype).data
    out.flags.writeable = False
    return HostArray(out.reshape(array.shape), dtype, array.shape)
