"""MXFP4 (OCP Microscaling, v1.0) of GPT-OSS: experts in blocks of 32 E2M1 floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from inl.checkpoints.quantized.matrix import BLOCK
from inl.checkpoints.quantized.matrix_format import Format, Parts, Shape
from inl.dtypes import HostArray


@final
class Mxfp4(Format):
    """Matrices [E, out, in] of experts: blocks of 16 bytes, and their exponents.

    A byte stores two neighboring codes, the first in the low half. The blocks of the
    dtype ``mxfp4`` store the first 16 codes in the low halves.
    """

    name = "MXFP4"
    marker = "_blocks"
    parts = ("blocks", "scales")
    joint = "_"

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # there are no options: the tensors say which are quantized

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        shape = parts.shape("blocks")
        if len(shape) != 4 or shape[3] != BLOCK // 2:
            accepted = f"[experts, rows, blocks, {BLOCK // 2}]"
            parts.refuse("blocks", f"shape {list(shape)}", accepted)
        parts.check("blocks", shape, dtypes=("uint8",))
        parts.check("scales", shape[:3], dtypes=("uint8",))
        return "mxfp4", (*shape[:2], shape[2] * BLOCK)

    def array(self, parts: Parts, dtype: str) -> HostArray:
        blocks, scales = parts.integers("blocks"), parts.integers("scales")
        if scales.size and scales.max() == 255:
            parts.refuse("scales", "the exponent 255, NaN", "0 to 254")
        codes = np.stack([blocks & 15, blocks >> 4], -1)
        codes = codes.reshape(*blocks.shape[:3], BLOCK)
        halves = codes[..., :16] | codes[..., 16:] << 4
        data = np.concatenate([scales[..., None], halves], -1)
        _, shape = self.spec(parts)
        return HostArray(data.reshape(*shape[:2], -1), dtype, shape)
