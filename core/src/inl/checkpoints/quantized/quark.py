"""AMD's Quark: FP8, MXFP4, integers of 4 and 8 bits, one of them for each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from inl.checkpoints.blocks.codes import FLOAT8_SCALED
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.quantized.block_floats import (
    MXFP4,
    MXFP8,
    block_kind,
    check_blocks,
    packed_blocks,
)
from inl.checkpoints.quantized.gptq_awq import AWQ_ORDER
from inl.checkpoints.quantized.matrix import QuantMatrix, unpack_words
from inl.checkpoints.quantized.matrix_format import MatrixFormat, Parts, Shape, option
from inl.checkpoints.quantized.scaled import (
    IGNORED,
    check_scaled,
    float8_blocks,
    float8_dtype,
    scaled_matrix,
)
from inl.dtypes import FLOAT8, HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CODES, SCALE, ZERO = "weight", "weight_scale", "weight_zero_point"
BLOCK: Final = (128, 128)
"""Rows and columns that share a scale of FP8 in blocks."""
BITS: Final = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
"""Bits of the integer dtypes."""
FLOATS: Final = ("fp8_e4m3", "fp8_e5m2", "fp4")
SCALES: Final = ("float32", "float16", "bfloat16")
STORED: Final = {"int4": "int32", "uint4": "int32", "int8": "int8", "uint8": "uint8"}
"""Dtypes of tensors of codes; words of eight 4-bit codes have 32 bits."""
PER_WORD: Final = 8


@final
class Quark(MatrixFormat):
    """Codes as ``global_quant_config`` describes them, or one of a layer's own.

    With scales per group the codes of integers are stored transposed: [K, N], with
    scales and zeros [G, N].
    """

    marker = f".{SCALE}"
    parts = (CODES, SCALE, ZERO)
    ignored = IGNORED

    def __init__(self, config: Mapping[str, Any]) -> None:
        export = config.get("export")
        export = export if isinstance(export, Mapping) else {}
        method = option(export, "pack_method", ("reorder", "order"), "reorder")
        option(export, "weight_format", ("real_quantized",), "real_quantized")
        self._order = AWQ_ORDER if method == "reorder" else list(range(PER_WORD))
        self._dtype = _dtype(config.get("global_quant_config"), "global_quant_config")
        layers = config.get("layer_quant_config")
        self._layers = {
            pattern: _dtype(each, f"layer_quant_config.{pattern}")
            for pattern, each in (layers.items() if isinstance(layers, Mapping) else ())
        }
        self.name = f"Quark, {self._dtype}"

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        kind, dtype = block_kind(parts, CODES, SCALE), self._dtype_of(parts)
        if kind in (MXFP4, MXFP8):
            return kind, check_blocks(parts, kind, CODES, SCALE, "")
        if dtype not in BITS or parts.dtype(CODES) in FLOAT8:
            shape = check_scaled(parts, SCALE, BLOCK, FLOAT8)
            return float8_dtype(parts, SCALE, shape), shape
        parts.check(CODES, parts.shape(CODES), dtypes=(STORED[dtype],))
        rows, size, groups = self._sizes(parts, dtype)
        per = PER_WORD if BITS[dtype] == 4 else 1
        grouped = len(parts.shape(SCALE)) == 2
        scales = (groups, rows) if grouped else parts.shape(SCALE)
        parts.check(SCALE, scales, dtypes=SCALES)
        if parts.has(ZERO):
            zeros = (groups, -(-rows // per)) if grouped else (-(-rows // per),)
            parts.check(ZERO, zeros if scales else ())
        width = size // groups
        if dtype == "uint8":
            return "float32", (rows, size)
        if dtype == "uint4":
            return parts.blocks("q4_1", SCALE, width, size, exact="q8_0"), (rows, size)
        symmetric = not parts.has(ZERO) or not parts.integers(ZERO).any()
        wanted = "q4_0" if dtype == "int4" else "q8_0"
        found = parts.blocks(wanted, SCALE, width, size) if symmetric else "float32"
        return found, (rows, size)

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        if dtype in (MXFP4, MXFP8):
            return packed_blocks(parts, dtype, CODES, SCALE)
        if dtype == FLOAT8_SCALED:
            return float8_blocks(parts, SCALE)
        return super().array(parts, dtype)

    def matrix(self, parts: Parts) -> QuantMatrix:
        dtype = self._dtype_of(parts)
        if dtype not in BITS or parts.dtype(CODES) in FLOAT8:
            return scaled_matrix(parts, SCALE, BLOCK)
        rows, size, groups = self._sizes(parts, dtype)
        grouped = len(parts.shape(SCALE)) == 2
        codes = self._codes(parts, CODES, dtype)
        scale, zero = parts.floats(SCALE), None
        if parts.has(ZERO):
            zero = self._codes(parts, ZERO, dtype).astype(np.int32)
            zero = zero[..., :rows] if zero.ndim else zero
        if grouped:
            codes, scale = np.ascontiguousarray(codes.T), scale.T
            zero = None if zero is None else zero.T
        shape = (rows, groups)
        scale = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1, groups), shape))
        if zero is not None:
            zero = np.ascontiguousarray(
                np.broadcast_to(zero.reshape(-1, groups), shape)
            )
        return QuantMatrix(codes[:rows], scale, zero, 1, None, size // groups)

    def _codes(self, parts: Parts, part: str, dtype: str) -> NDArray[Any]:
        """Return the codes of a part, signed or not, words along its last axis."""
        stored = parts.integers(part)
        if BITS[dtype] == 8 or not stored.ndim:
            return stored
        codes = unpack_words(stored, 4)
        codes = codes.reshape(*stored.shape, PER_WORD)[..., self._order]
        codes = codes.reshape(*stored.shape[:-1], -1)
        if dtype == "uint4":
            return codes
        return (codes.astype(np.int8) ^ 8) - np.int8(8)

    def _sizes(self, parts: Parts, dtype: str) -> tuple[int, int, int]:
        """Return rows, columns and groups of columns of a matrix of integers."""
        stored, scale = parts.shape(CODES), parts.shape(SCALE)
        if len(stored) != 2 or len(scale) > 2:
            parts.refuse(CODES, f"shape {list(stored)}", "2 axes")
        per = PER_WORD if BITS[dtype] == 4 else 1
        if len(scale) < 2:
            return stored[0], stored[1] * per, 1
        groups, rows = scale
        if not groups or stored[0] % groups or -(-rows // per) != stored[1]:
            accepted = f"[groups, {stored[1] * per}]"
            parts.refuse(SCALE, f"shape {list(scale)}", accepted)
        return rows, stored[0], groups

    def _dtype_of(self, parts: Parts) -> str:
        module = parts.names[SCALE].removesuffix(self.marker)
        for pattern, dtype in self._layers.items():
            if fnmatchcase(module, pattern):
                return dtype
        return self._dtype


def _dtype(scheme: Any, field: str) -> str:
    """Return the dtype of weights of a scheme; raises :class:`CheckpointError`."""
    weight = scheme.get("weight") if isinstance(scheme, Mapping) else None
    if isinstance(weight, list) and len(weight) == 1:
        weight = weight[0]
    found = weight.get("dtype") if isinstance(weight, Mapping) else None
    if found is None and not isinstance(weight, list):
        return "none"
    if found not in (*BITS, *FLOATS):
        raise CheckpointError(
            f"config field 'quantization_config.{field}.weight.dtype': found "
            f"{show(found)}, accepted: {', '.join((*BITS, *FLOATS))}, in one stage"
        )
    return str(found)
