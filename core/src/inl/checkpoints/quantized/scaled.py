"""FP8 and compressed-tensors: weights of small dtypes with scales beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np

from inl.checkpoints.blocks.codes import FLOAT8_SCALED
from inl.checkpoints.blocks.dtypes import BLOCK_DTYPES, dequantize
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.quantized.block_floats import (
    MXFP8,
    NVFP4,
    block_kind,
    check_blocks,
    nvfp4_matrix,
    packed_blocks,
)
from inl.checkpoints.quantized.matrix import BLOCK, QuantMatrix, unpack_words
from inl.checkpoints.quantized.matrix_format import (
    MatrixFormat,
    Parts,
    Shape,
    columns_of,
    option,
)
from inl.dtypes import E8M0, FLOAT8, HostArray
from inl.errors import CheckpointError

SCALES: Final = ("float32", "bfloat16", "float16", E8M0)
INTEGERS: Final = ("int8",)
IGNORED: Final = (
    ".input_scale", ".input_zero_point", ".activation_scale", ".k_scale", ".v_scale",
    ".kv_scale",
    ".q_scale", ".output_scale", ".input_global_scale", ".input_scale_inv",
)  # fmt: skip
"""Suffixes of static scales of activations and caches."""


def scaled_matrix(parts: Parts, scale: str, block: tuple[int, int]) -> QuantMatrix:
    """Read ``weight`` with a scale per tensor, row or ``block`` of rows and columns."""
    array = parts.array("weight")
    count, size = array.shape
    scales = parts.floats(scale)
    zero = None
    if scales.size == 1:
        scales, rows, width = scales.reshape(1, 1), count, size
    elif scales.shape[0] == count:
        scales = scales.reshape(count, -1)
        rows, width = 1, -(-size // scales.shape[1])
    else:
        rows, width = block
    if parts.has("weight_zero_point"):
        zero = parts.integers("weight_zero_point").astype(np.int32)
        zero = zero.reshape(scales.shape)
    stored = array.dtype in FLOAT8
    codes = dequantize(array, parts.names["weight"]) if stored else array.data
    return QuantMatrix(codes.reshape(array.shape), scales, zero, rows, None, width)


def float8_dtype(parts: Parts, scale: str, shape: Shape) -> str:
    """Return :data:`FLOAT8_SCALED` if its blocks store the matrix, else "float32".

    They do with one scale, or one for each row.
    """
    is_e4m3 = parts.dtype("weight") == "float8_e4m3"
    rows = parts.shape(scale) in ((), (1,), (1, 1), shape[:1], (shape[0], 1))
    whole = not shape[1] % BLOCK_DTYPES[FLOAT8_SCALED].block
    plain = not parts.has("weight_zero_point")
    return FLOAT8_SCALED if is_e4m3 and rows and whole and plain else "float32"


def float8_blocks(parts: Parts, scale: str) -> HostArray:
    """Read a matrix of :func:`float8_dtype` in blocks."""
    array, size = parts.array("weight"), BLOCK_DTYPES[FLOAT8_SCALED].block
    count, columns = array.shape
    codes = array.data.view(np.uint8).reshape(count, -1, size)
    scales = parts.floats(scale).astype(np.float32).reshape(-1, 1, 1)
    heads = np.broadcast_to(scales, (count, columns // size, 1))
    bits = np.ascontiguousarray(heads).view(np.uint8)
    data = np.concatenate([bits, codes], axis=2).reshape(count, -1)
    return HostArray(data, FLOAT8_SCALED, array.shape)


def check_scaled(
    parts: Parts, scale: str, block: tuple[int, int], dtypes: tuple[str, ...]
) -> Shape:
    """Check ``weight`` and its scale; return the shape of the matrix."""
    shape = parts.shape("weight")
    if len(shape) != 2:
        parts.refuse("weight", f"shape {list(shape)}", "2 axes")
    parts.check("weight", shape, dtypes=dtypes)
    blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    accepted = [(), (1,), (1, 1), shape[:1], (shape[0], 1), blocks]
    found = parts.shape(scale)
    if (
        len(found) == 2
        and found[0] == shape[0]
        and found[1]
        and not shape[1] % found[1]
    ):
        accepted.append(found)  # groups of columns
    parts.check(scale, *dict.fromkeys(accepted), dtypes=SCALES)
    if parts.has("weight_zero_point"):
        parts.check("weight_zero_point", parts.shape(scale), dtypes=INTEGERS)
    return shape


def block_of(value: Any, field: str) -> tuple[int, int]:
    """Return the rows and columns of a block; raises :class:`CheckpointError`."""
    if value is None:
        return 128, 128
    listed = list(value) if isinstance(value, (list, tuple)) else []
    if len(listed) != 2 or not all(type(one) is int and one > 0 for one in listed):
        raise CheckpointError(
            f"config field 'quantization_config.{field}': found {show(value)}, "
            "accepted: two integers above 0"
        )
    return listed[0], listed[1]


@final
class Fp8(MatrixFormat):
    """Weights in 8-bit floats; scales per tensor, row or block."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        option(config, "activation_scheme", ("dynamic", "static"), "dynamic")
        option(config, "fmt", ("e4m3", "e5m2"), "e4m3")
        given = config.get("weight_block_size")
        self._block = block_of(given, "weight_block_size")
        size = " x ".join(map(str, self._block))
        self.name = f"FP8, blocks of {size}" if given else "FP8"
        self.scale = "weight_scale_inv" if given else "weight_scale"
        self.marker = f".{self.scale}"
        self.parts = ("weight", self.scale)
        self.ignored = IGNORED

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        if block_kind(parts, "weight", self.scale) == MXFP8:
            return MXFP8, check_blocks(parts, MXFP8, "weight", self.scale, "")
        shape = check_scaled(parts, self.scale, self._block, FLOAT8)
        return float8_dtype(parts, self.scale, shape), shape

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        if dtype == MXFP8:
            return packed_blocks(parts, MXFP8, "weight", self.scale)
        if dtype == FLOAT8_SCALED:
            return float8_blocks(parts, self.scale)
        return super().array(parts, dtype)

    def matrix(self, parts: Parts) -> QuantMatrix:
        return scaled_matrix(parts, self.scale, self._block)


def fbgemm(_config: Mapping[str, Any]) -> Fp8:
    """Return the format of FBGEMM: FP8 with a scale per row."""
    form = Fp8({})
    form.name = "FBGEMM FP8"
    form.ignored = (*IGNORED, ".input_scale_ub")
    return form


def mxfp8(config: Mapping[str, Any]) -> Fp8:
    """Return the format of FP8 whose scales are powers of two of 32 columns."""
    form = Fp8({"weight_block_size": [1, BLOCK]} | dict(config))
    form.name = "MXFP8"
    return form


@final
class CompressedTensors(MatrixFormat):
    """Weights in 8-bit floats or integers, or in words of codes from -2**(bits-1)."""

    marker = ".weight_scale"
    parts = (
        "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
        "weight_g_idx", "weight_global_scale",
    )  # fmt: skip
    ignored = IGNORED
    FORMATS = (
        "pack-quantized", "float-quantized", "int-quantized", "naive-quantized",
        "dense", "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
        "mxfp8-quantized",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any]) -> None:
        form = option(config, "format", self.FORMATS, "dense")
        self.name = f"compressed-tensors, {form}"
        sparse = _fields(config, "sparsity_config").get("format")
        if sparse not in (None, "dense"):
            raise CheckpointError(
                "config field 'quantization_config.sparsity_config.format': found "
                f"{show(sparse)}, accepted: dense"
            )
        if _fields(config, "transform_config").get("config_groups"):
            raise CheckpointError(
                "config field 'quantization_config.transform_config': found rotations "
                "of activations, accepted: none"
            )
        for scheme in _fields(config, "config_groups").values():
            if isinstance(scheme, Mapping) and "format" in scheme:
                option(scheme, "format", (*self.FORMATS, None), None)
        self._block = block_of(
            _block_structure(config), "config_groups.block_structure"
        )
        self._rounds_rows = _rounds_activations(config)

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        if kind := self._kind(parts):
            if parts.has("weight_zero_point"):
                parts.refuse("weight_zero_point", "zero points", "none in such blocks")
            shape = check_blocks(
                parts, kind, _codes(parts), "weight_scale", "weight_global_scale"
            )
            return "float32" if kind == NVFP4 else kind, shape
        if not parts.has("weight_packed"):
            dtypes = (*FLOAT8, *INTEGERS)
            shape = check_scaled(parts, "weight_scale", self._block, dtypes)
            return self._blocks(parts, shape), shape
        rows, size, bits, width = self._packed(parts)
        groups = -(-size // width)
        parts.check("weight_scale", (rows, groups), dtypes=SCALES)
        if parts.has("weight_zero_point"):
            words = -(-rows // (32 // bits)), groups
            parts.check("weight_zero_point", words, dtypes=("int32",))
        if parts.has("weight_g_idx"):
            return "float32", (rows, size)
        symmetric = not parts.has("weight_zero_point")
        if bits == 8 and not symmetric:
            return "float32", (rows, size)  # blocks of 8 bits have no offsets
        dtype = "q8_0" if bits == 8 else "q4_0" if symmetric else "q4_1"
        exact = dtype if symmetric else "q8_0"
        dtype = parts.blocks(dtype, "weight_scale", width, size, exact=exact)
        return dtype, (rows, size)

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        if dtype == self._kind(parts):
            return packed_blocks(parts, dtype, _codes(parts), "weight_scale")
        if dtype == FLOAT8_SCALED:
            return float8_blocks(parts, "weight_scale")
        return super().array(parts, dtype)

    def matrix(self, parts: Parts) -> QuantMatrix:
        if self._kind(parts) == NVFP4:
            factor = float(parts.floats("weight_global_scale").reshape(()))
            if not factor:
                parts.refuse("weight_global_scale", "0", "a divisor of scales")
            return nvfp4_matrix(parts, _codes(parts), "weight_scale", 1 / factor)
        if not parts.has("weight_packed"):
            return scaled_matrix(parts, "weight_scale", self._block)
        rows, size, bits, width = self._packed(parts)
        codes = unpack_words(parts.integers("weight_packed"), bits)[:, :size]
        scale = parts.floats("weight_scale")
        zero = np.full(scale.shape, 1 << bits - 1, np.int32)
        if parts.has("weight_zero_point"):
            words = parts.integers("weight_zero_point")
            zero = unpack_words(words, bits, axis=0)[:rows].astype(np.int32)
        columns = columns_of(parts, "weight_g_idx", width, scale.shape[1])
        return QuantMatrix(codes, scale, zero, 1, columns, width)

    def _kind(self, parts: Parts) -> str | None:
        return block_kind(parts, _codes(parts), "weight_scale")

    def _blocks(self, parts: Parts, shape: Shape) -> str:
        """Return the dtype of a matrix of bytes."""
        if self._rounds_rows and parts.dtype("weight") in FLOAT8:
            return float8_dtype(parts, "weight_scale", shape)
        if parts.dtype("weight") not in INTEGERS or parts.has("weight_zero_point"):
            return "float32"
        scale = parts.shape("weight_scale")
        per_row = len(scale) < 2 or scale[1] == 1
        width = shape[1] if per_row else shape[1] // scale[1]
        return parts.blocks("q8_0", "weight_scale", width, shape[1])

    def _packed(self, parts: Parts) -> tuple[int, int, int, int]:
        """Return rows, columns, bits and columns per group."""
        parts.check("weight_shape", (2,), dtypes=("int64", "int32"))
        rows, size = (int(one) for one in parts.integers("weight_shape"))
        packed = parts.shape("weight_packed")
        bits = {-(-size * bits // 32): bits for bits in (8, 4, 2)}
        if len(packed) != 2 or packed[0] != rows or packed[1] not in bits or size < 1:
            parts.refuse(
                "weight_packed",
                f"shape {list(packed)} for weight_shape {[rows, size]}",
                "rows of 2, 4 or 8 bits",
            )
        scale = parts.shape("weight_scale")
        groups = scale[1] if len(scale) == 2 and scale[1] else 1
        return rows, size, bits[packed[1]], -(-size // groups)


def _codes(parts: Parts) -> str:
    return "weight_packed" if parts.has("weight_packed") else "weight"


def _fields(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of the config, empty if it is absent or null."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"config field 'quantization_config.{name}': found {show(found)}, "
            "accepted: an object"
        )
    return found


def _rounds_activations(config: Mapping[str, Any]) -> bool:
    """Whether the activations of all quantized layers are to be rounded."""
    groups = list((config.get("config_groups") or {}).values())
    return bool(groups) and all(
        isinstance(scheme, Mapping) and scheme.get("input_activations")
        for scheme in groups
    )


def _block_structure(config: Mapping[str, Any]) -> Any:
    for scheme in (config.get("config_groups") or {}).values():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure"):
            return weights["block_structure"]
    return None
