"""Random quantized blocks with realistic scales."""

from __future__ import annotations

import numpy as np

from inl.weights.quant import BLOCKS

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
}
"""Byte offsets of the scale of a block, and of its offset or the offset's scale."""

SUBTRACTED = ("q2_k", "q4_k", "q5_k")
"""Kinds that subtract their offsets."""


def random_blocks(rng, kind, rows, columns, size=1.0):
    """Rows of bytes; ``size`` scales all scales."""
    elements, nbytes = BLOCKS[kind]
    count = rows, columns // elements
    blocks = rng.integers(0, 256, (*count, nbytes), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.02, count)
    if kind == "mxfp4":
        blocks[:, :, 0] = rng.integers(118, 124, count)
    for index, at in enumerate(HALVES[kind]):
        value = scale if index == 0 else 8 * scale * (1 if kind in SUBTRACTED else -1)
        half = np.asarray(value * size, np.float16)[..., None]
        blocks[:, :, at : at + 2] = half.view(np.uint8)
    return blocks.reshape(rows, -1)
