"""Random quantized blocks with realistic scales."""

from __future__ import annotations

import numpy as np

from inl.checkpoints.blocks.dtypes import BLOCKS

HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "mxfp4": (),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq1_s": (0,),
    "iq1_m": (),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
}
"""Byte offsets of the scale of a block, and of its offset or the offset's scale."""

SUBTRACTED = ("q2_k", "q4_k", "q5_k")
"""Kinds that subtract their offsets."""


NIBBLES = (49, 51, 53, 55)
"""Bytes of a block of iq1_m whose high halves are the scale, the lowest bits first."""


def scale_bytes(kind):
    """Byte offsets of everything that scales a whole block."""
    if kind == "iq1_m":
        return NIBBLES
    if kind == "mxfp4":
        return (0,)
    return tuple(at + byte for at in HALVES[kind] for byte in range(2))


def random_blocks(rng, kind, rows, columns, size=1.0):
    """Rows of bytes; ``size`` scales all scales."""
    elements, nbytes = BLOCKS[kind]
    count = rows, columns // elements
    blocks = rng.integers(0, 256, (*count, nbytes), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.02, count)
    if kind == "mxfp4":
        blocks[:, :, 0] = rng.integers(118, 124, count)
    if kind == "iq1_m":
        bits = np.asarray(scale * size, np.float16).view(np.uint16)
        for index, at in enumerate(NIBBLES):
            nibble = (bits >> 4 * index & 15).astype(np.uint8)
            blocks[:, :, at] = blocks[:, :, at] & 15 | nibble << 4
    for index, at in enumerate(HALVES[kind]):
        value = scale if index == 0 else 8 * scale * (1 if kind in SUBTRACTED else -1)
        half = np.asarray(value * size, np.float16)[..., None]
        blocks[:, :, at : at + 2] = half.view(np.uint8)
    return blocks.reshape(rows, -1)
