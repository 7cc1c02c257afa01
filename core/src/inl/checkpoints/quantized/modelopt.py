"""NVIDIA's ModelOpt: FP8, NVFP4 and MXFP8, one of them for each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np

from inl.checkpoints.blocks.codes import FLOAT8_SCALED
from inl.checkpoints.quantized.block_floats import (
    MXFP8,
    NVFP4,
    block_kind,
    check_blocks,
    nvfp4_matrix,
    packed_blocks,
)
from inl.checkpoints.quantized.matrix import QuantMatrix
from inl.checkpoints.quantized.matrix_format import MatrixFormat, Parts, Shape, option
from inl.checkpoints.quantized.scaled import (
    IGNORED,
    check_scaled,
    float8_blocks,
    float8_dtype,
    scaled_matrix,
)
from inl.dtypes import FLOAT8, HostArray, wrap

ALGORITHMS: Final = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4_AWQ",
    "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
"""Accepted values of ``quant_algo``."""
CODES, SCALE, FACTOR, INPUTS = (
    "weight", "weight_scale", "weight_scale_2", "pre_quant_scale",
)  # fmt: skip
BLOCK: Final = (128, 128)
"""Rows and columns that share a scale of ``FP8_PB_WO``."""


@final
class ModelOpt(MatrixFormat):
    """Matrices whose dtypes say how each is quantized."""

    marker = f".{SCALE}"
    parts = (CODES, SCALE, FACTOR, INPUTS)
    ignored = IGNORED

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name = f"modelopt, {option(config, 'quant_algo', ALGORITHMS)}"

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        kind = block_kind(parts, CODES, SCALE)
        if kind in (NVFP4, MXFP8):
            shape = check_blocks(parts, kind, CODES, SCALE, FACTOR)
            dtype = "float32" if kind == NVFP4 else kind
        else:
            shape = check_scaled(parts, SCALE, BLOCK, FLOAT8)
            dtype = float8_dtype(parts, SCALE, shape)
        if parts.has(INPUTS):
            if kind == MXFP8:
                parts.refuse(INPUTS, "factors of inputs", "none beside MXFP8")
            parts.check(INPUTS, shape[1:])
            dtype = "float32"
        return dtype, shape

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        if dtype == MXFP8:
            return packed_blocks(parts, MXFP8, CODES, SCALE)
        if dtype == FLOAT8_SCALED:
            return float8_blocks(parts, SCALE)
        values = super().array(parts, dtype)
        if values is None or not parts.has(INPUTS):
            return values
        # Factors of inputs are factors of columns.
        return wrap(values.data * parts.floats(INPUTS).astype(np.float32))

    def matrix(self, parts: Parts) -> QuantMatrix:
        if block_kind(parts, CODES, SCALE) == NVFP4:
            factor = float(parts.floats(FACTOR).reshape(()))
            return nvfp4_matrix(parts, CODES, SCALE, factor)
        return scaled_matrix(parts, SCALE, BLOCK)
