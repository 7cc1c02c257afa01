"""Detection of NaN and infinity in stored tensors, near the speed of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.blocks.dtypes import BLOCKS, dequantize
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXPONENTS: Final = {
    "float64": (np.uint64, 0x7FF0000000000000),
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
"""Bits of each dtype as an unsigned integer, and its exponent bits: NaN and infinity
have all of them set."""

HALVES: Final = {
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq1_s": (0,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
}
"""Bytes at which a block of a quantized dtype has a float16 scale or offset. With
finite ones all its elements are finite."""

MAX_E8M0: Final = {"mxfp4": 253, "mxfp8": 246}
"""Exponents of blocks from here on may overflow float32; 255 is NaN."""

MAX_SCALE: Final = 2.0**118
"""Scales of E4M3 from here on may overflow float32."""

CHUNK: Final = 1 << 16
"""Elements per pass: they and a scratch buffer fit in a core's cache."""


def check_finite(array: HostArray, where: str) -> None:
    """Raise :class:`CheckpointError` for the first NaN or infinity.

    where: file and tensor, for the message. Integers, and quantized dtypes without a
    decoder in this package, are not checked.
    """
    if not _may_have_non_finite(array):
        return
    values = dequantize(array, where)
    invalid = np.argwhere(~np.isfinite(values))
    if not len(invalid):
        return
    index = tuple(int(axis) for axis in invalid[0])
    raise CheckpointError(
        f"{where}: found {values[index]} at {list(index)}; accepted: finite numbers. "
        "The file is damaged, or was saved after training diverged; "
        "EngineConfig(check_weights=False) loads it anyway"
    )


def _may_have_non_finite(array: HostArray) -> bool:
    """Return False only if all elements are finite."""
    if not array.size:
        return False
    if array.dtype in HALVES:
        halves = array.data.view("<u2").reshape(-1, BLOCKS[array.dtype][1] // 2)
        return any(
            _any_all_ones(halves[:, at // 2], 0x7C00) for at in HALVES[array.dtype]
        )
    if array.dtype in MAX_E8M0:
        blocks = array.data.reshape(-1, BLOCKS[array.dtype][1])
        if blocks[:, 0].max() >= MAX_E8M0[array.dtype]:
            return True
        return array.dtype == "mxfp8" and _any_all_ones(blocks[:, 1:].flatten(), 0x7F)
    if array.dtype == "fp8_128":
        blocks = array.data.reshape(-1, BLOCKS[array.dtype][1])
        scales = np.abs(np.ascontiguousarray(blocks[:, :4]).view("<f4"))
        limited = bool((scales < MAX_SCALE).all())
        return not limited or _any_all_ones(blocks[:, 4:].flatten(), 0x7F)
    if array.dtype not in EXPONENTS:
        return False
    unsigned, mask = EXPONENTS[array.dtype]
    return _any_all_ones(array.data.reshape(-1).view(unsigned), mask)


def _any_all_ones(bits: NDArray[Any], mask: int) -> bool:
    """Return whether an element of ``bits`` [n] has every bit of ``mask`` set."""
    scratch = np.empty(min(CHUNK, len(bits)), bits.dtype)
    for start in range(0, len(bits), CHUNK):
        piece = bits[start : start + CHUNK]
        part = np.bitwise_and(piece, bits.dtype.type(mask), out=scratch[: len(piece)])
        if part.max() == mask:
            return True
    return False
