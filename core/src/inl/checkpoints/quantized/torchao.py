"""torchao: tensor subclasses flattened to safetensors, their types in its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, final

import numpy as np

from inl.bounded_json import parse_json
from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.quantized.matrix import QuantMatrix
from inl.checkpoints.quantized.matrix_format import MatrixFormat, Parts, Shape
from inl.dtypes import FLOAT8
from inl.errors import CheckpointError

QDATA: Final = "_weight_qdata"
SCALE: Final = "_weight_scale"
ZERO: Final = "_weight_zero_point"
BOTH: Final = "_weight_scale_and_zero"
INPUT_SCALE: Final = "_weight_act_pre_scale"
FLOATS: Final = ("float32", "bfloat16", "float16")
TILE: Final = (8, 16)
"""Rows and columns of the tiles of Int4TilePackedTo4dTensor."""
LANES: Final = 32
"""Lanes that store a tile of it; their words follow one another."""


class Layout(NamedTuple):
    """What the metadata of a matrix say, with those of its parts that are checked."""

    kind: str
    shape: Shape
    block: Shape
    """Rows and columns that share a scale."""
    bits: int

    @property
    def groups(self) -> Shape:
        """Rows and columns of the scales."""
        return self.shape[0] // self.block[0], self.shape[1] // self.block[1]


@final
class TorchAo(MatrixFormat):
    """Matrices of the subclasses in ``READERS``; activations are not quantized."""

    marker = f".{QDATA}"
    parts = (QDATA, SCALE, ZERO, BOTH, INPUT_SCALE)
    ignored = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")

    def __init__(self, config: Mapping[str, Any]) -> None:
        named = config.get("quant_type")
        if isinstance(named, Mapping):
            named = named.get("default", named)
        if isinstance(named, Mapping):
            named = named.get("_type")
        if not isinstance(named, str):
            raise CheckpointError(
                "config field 'quantization_config.quant_type': found "
                f"{show(config.get('quant_type'))}, accepted: a name, or an object "
                "with 'default' and its '_type'"
            )
        self.name = f"torchao {named:.80}"

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        parts, layout = _layout(parts)
        return READERS[layout.kind].spec(parts, layout), layout.shape

    def matrix(self, parts: Parts) -> QuantMatrix:
        parts, layout = _layout(parts)
        return READERS[layout.kind].matrix(parts, layout)


def _layout(parts: Parts) -> tuple[Parts, Layout]:
    """Return the parts, which name the subclass in errors, and its metadata."""
    stored = parts.checkpoint.stored_name(parts.names[QDATA])
    owner = f"{stored.removesuffix(QDATA)}weight"
    text = parts.checkpoint.metadata.get(owner)
    if text is None:
        parts.refuse(QDATA, f"no metadata {owner!r} in the header of the file", "some")
    try:
        fields = parse_json(str(text), owner)
        kind, data = fields["_type"], fields["_data"]
        block = tuple(data["block_size"])
        target = data.get("target_dtype", {"_data": "int8"})["_data"]
        given = data.get("shape")
    except (ValueError, KeyError, TypeError, AttributeError):
        parts.refuse(QDATA, f"metadata {show(text)}", "a subclass with a block_size")
    if kind not in READERS:
        parts.refuse(QDATA, f"the subclass {show(kind)}", ", ".join(READERS))
    parts = replace(parts, form=f"{parts.form}, {kind}")
    if parts.has(INPUT_SCALE):
        parts.refuse(INPUT_SCALE, "a factor on inputs", "none")
    shape = READERS[kind].shape(parts) if given is None else given
    sizes = (*shape, *block) if isinstance(shape, (list, tuple)) else ()
    if len(sizes) != 4 or not all(type(one) is int and one > 0 for one in sizes):
        parts.refuse(QDATA, f"shape {show(shape)}, block_size {block}", "2 of each")
    if shape[0] % block[0] or shape[1] % block[1]:
        parts.refuse(QDATA, f"block_size {block}", f"divisors of {list(shape)}")
    if target not in BITS:
        parts.refuse(QDATA, f"target_dtype {show(target)}", ", ".join(BITS))
    return parts, Layout(kind, tuple(shape), block, BITS[target])


BITS: Final = {f"int{bits}": bits for bits in range(1, 9)}


class Reader(NamedTuple):
    """How a subclass is checked and read."""

    shape: Callable[[Parts], Shape]
    """Shape of a matrix whose metadata have none."""
    spec: Callable[[Parts, Layout], str]
    """Checks the parts; returns the dtype to load the matrix in."""
    matrix: Callable[[Parts, Layout], QuantMatrix]


def _stored_shape(parts: Parts) -> Shape:
    return parts.shape(QDATA)


def _bytes_spec(parts: Parts, layout: Layout) -> str:
    parts.check(QDATA, layout.shape, dtypes=("int8",))
    parts.check(SCALE, layout.groups, dtypes=FLOATS)
    signed = True
    if parts.has(ZERO):
        parts.check(ZERO, layout.groups, dtypes=("int8", "int32", *FLOATS))
        signed = not _zeros(parts).any()
    if layout.bits <= 4:
        dtype = "q4_0" if signed else "q4_1"
    else:
        dtype = "q8_0" if signed else "float32"
    exact = dtype if signed else "q8_0" if _is_integer(parts) else "float32"
    width, size = layout.block[1], layout.shape[1]
    return parts.blocks(dtype, SCALE, width, size, exact=exact)


def _bytes(parts: Parts, layout: Layout) -> QuantMatrix:
    scale, (rows, width) = parts.floats(SCALE), layout.block
    zero, offset = None, None
    if _is_integer(parts):
        zero = _zeros(parts).astype(np.int32)
    elif parts.has(ZERO):
        offset = -_zeros(parts) * scale
    codes = parts.integers(QDATA)
    return QuantMatrix(codes, scale, zero, rows, None, width, offset)


def _is_integer(parts: Parts) -> bool:
    return parts.has(ZERO) and parts.dtype(ZERO) not in FLOATS


def _zeros(parts: Parts) -> Any:
    return parts.integers(ZERO) if _is_integer(parts) else parts.floats(ZERO)


def _nibbles_spec(parts: Parts, layout: Layout) -> str:
    (rows, size), groups = layout.shape, layout.groups[::-1]
    if layout.block[0] != 1 or size % 2:
        parts.refuse(QDATA, f"block_size {layout.block}", "one row of even columns")
    parts.check(QDATA, (rows, size // 2), dtypes=("int8", "uint8"))
    parts.check(SCALE, groups, dtypes=FLOATS)
    parts.check(ZERO, groups, dtypes=FLOATS)
    width = layout.block[1]
    return parts.blocks("q4_1", SCALE, width, size, exact="float32")


def _nibbles(parts: Parts, layout: Layout) -> QuantMatrix:
    """Signed codes, the first in the low half; "zero points" are offsets."""
    data = parts.integers(QDATA).view(np.uint8)
    codes = np.stack([data & 15, data >> 4], -1).reshape(layout.shape)
    signed = (codes ^ 8).astype(np.int8) - np.int8(8)
    scale, offset = (np.ascontiguousarray(parts.floats(one).T) for one in (SCALE, ZERO))
    return QuantMatrix(signed, scale, None, 1, None, layout.block[1], offset)


def _tiles_spec(parts: Parts, layout: Layout) -> str:
    stored = parts.shape(QDATA)
    if len(stored) != 4 or stored[2] != LANES or not 1 <= stored[3] <= 4:
        accepted = f"[rows / 8, tiles, {LANES}, 1 to 4]"
        parts.refuse(QDATA, f"shape {list(stored)}", accepted)
    parts.check(QDATA, stored, dtypes=("int32",))
    rows, size = stored[0] * TILE[0], stored[1] * stored[3] * 2 * TILE[1]
    width = layout.block[1]
    if layout.block[0] != 1 or rows < layout.shape[0] or size < layout.shape[1]:
        parts.refuse(
            QDATA, f"{rows} x {size} codes, block_size {layout.block}",
            f"at least {layout.shape[0]} x {layout.shape[1]}, blocks of one row",
        )  # fmt: skip
    parts.check(BOTH, (-(-size // width), rows, 2), dtypes=FLOATS)
    return parts.blocks("q4_1", BOTH, width, layout.shape[1], exact="float32")


def _tiles(parts: Parts, layout: Layout) -> QuantMatrix:
    """Codes from -8 in words of eight, as the tensor cores of tinygemm read them.

    Lane t of a tile of 8 rows has its row t / 4. Of each 32 columns it has those from
    2 * (t % 4): two in a row, at steps of 8. Even places of a word store the first of
    each two in its low half, the others in its high half.
    """
    words = parts.integers(QDATA).view(np.uint32)
    tiles, outer, _, inner = words.shape
    shifts = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)
    codes = (words[..., None] >> shifts & 15).astype(np.int8) - np.int8(8)
    # tile, outer, row of 8, lane of 4, inner, step of 4, one of two
    split = codes.reshape(tiles, outer, TILE[0], 4, inner, 4, 2)
    whole = split.transpose(0, 2, 1, 4, 5, 3, 6).reshape(tiles * TILE[0], -1)
    rows, size = layout.shape
    both = parts.floats(BOTH)[: layout.groups[1], :rows]
    scale, offset = (np.ascontiguousarray(both[..., one].T) for one in (0, 1))
    codes = np.ascontiguousarray(whole[:rows, :size])
    return QuantMatrix(codes, scale, None, 1, None, layout.block[1], offset)


def _floats_spec(parts: Parts, layout: Layout) -> str:
    parts.check(QDATA, layout.shape, dtypes=FLOAT8)
    parts.check(SCALE, layout.groups, dtypes=FLOATS)
    return "float32"


def _floats(parts: Parts, layout: Layout) -> QuantMatrix:
    codes = dequantize(parts.array(QDATA), parts.names[QDATA])
    rows, width = layout.block
    return QuantMatrix(codes, parts.floats(SCALE), None, rows, None, width)


READERS: Final = {
    "Int8Tensor": Reader(_stored_shape, _bytes_spec, _bytes),
    "IntxUnpackedToInt8Tensor": Reader(_stored_shape, _bytes_spec, _bytes),
    "Int4Tensor": Reader(_stored_shape, _nibbles_spec, _nibbles),
    "Int4TilePackedTo4dTensor": Reader(_stored_shape, _tiles_spec, _tiles),
    "Float8Tensor": Reader(_stored_shape, _floats_spec, _floats),
}
"""Subclasses by the ``_type`` in the metadata."""
