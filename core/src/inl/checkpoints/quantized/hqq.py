"""HQQ (Badri and Shaji, 2023): unsigned codes with scales and float zeros of groups.

Each matrix is stored with its options, as tensors of one number or of characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from inl.checkpoints.quantized.matrix import BLOCK, QuantMatrix
from inl.checkpoints.quantized.matrix_format import Format, Parts, Shape
from inl.dtypes import HostArray, wrap

if TYPE_CHECKING:
    from numpy.typing import NDArray

CODES, OPTIONS = "W_q", (
    "nbits", "group_size", "axis", "packing", "view_as_float", "unpack_view_dtype",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
    "round_zero",
)  # fmt: skip
PER_UNIT: Final = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Codes of a byte by their bits; of 3 bits, of a word of 32."""
FLOATS: Final = ("float16", "bfloat16", "float32")


@final
class Hqq(Format):
    """Groups are runs of ``group_size`` numbers of a matrix.

    They are the rows of [N * K / group, group] with ``axis`` 1, and the columns of
    [group, N * K / group] with ``axis`` 0. A unit has codes of evenly spaced rows of
    that array, the first in the highest bits.
    """

    name = "HQQ"
    marker = f".{CODES}"
    parts = (CODES, "scale", "zero", "shape", *OPTIONS)

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # the tensors describe themselves

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        shape, bits, group, axis = self._options(parts)
        count = shape[0] * shape[1] // group
        scales = (count, 1) if axis else (1, count)
        parts.check("scale", scales, dtypes=FLOATS)
        parts.check("zero", scales, dtypes=FLOATS)
        lines = group if axis == 0 else count
        units = -(-lines // PER_UNIT[bits]), count if axis == 0 else group
        found = parts.shape(CODES)
        if parts.integers("view_as_float"):
            size = units[0] * units[1] * (4 if bits == 3 else 1)
            if parts.array(CODES).data.nbytes != size:
                parts.refuse(CODES, f"shape {list(found)}", f"{size} bytes")
        else:
            parts.check(CODES, units, dtypes=("int32" if bits == 3 else "uint8",))
        runs = axis and bits <= 4 and not shape[1] % group and not group % BLOCK
        return "q4_1" if runs and parts.rounding else "float32", shape

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        shape, bits, group, axis = self._options(parts)
        codes = self._codes(parts, shape, bits, group, axis)
        scale, zero = parts.floats("scale"), parts.floats("zero")
        if dtype != "float32":
            groups = (shape[0], -1)
            scale, zero = scale.reshape(groups), zero.reshape(groups)
            matrix = QuantMatrix(
                codes.reshape(shape), scale, None, 1, None, group, -scale * zero
            )
            return matrix.blocks(dtype) or matrix.values()
        values = codes.astype(np.float32)
        values -= zero
        values *= scale
        return wrap(values.reshape(shape))

    def _codes(
        self, parts: Parts, shape: Shape, bits: int, group: int, axis: int
    ) -> NDArray[Any]:
        """Return the codes in the shape that groups have."""
        count = shape[0] * shape[1] // group
        lines, width = (count, group) if axis else (group, count)
        per = PER_UNIT[bits]
        stored = np.ascontiguousarray(parts.integers(CODES))
        flat = stored.reshape(-1)
        words: NDArray[Any] = flat.view(np.uint32 if bits == 3 else np.uint8)
        units = words.reshape(-1, width)
        shifts = range((per - 1) * bits, -1, -bits) if per > 1 else (0,)
        mask = units.dtype.type(2**bits - 1 if per > 1 else 255)
        return np.concatenate([units >> shift & mask for shift in shifts])[:lines]

    def _options(self, parts: Parts) -> tuple[Shape, int, int, int]:
        """Return shape [N, K], bits, numbers of a group and axis of groups."""
        for part in ("nbits", "group_size", "axis", "view_as_float"):
            parts.check(part, (), (1,))
        parts.check("shape", (2,))
        rows, size = (int(one) for one in parts.integers("shape"))
        numbers = parts.integers("nbits"), parts.integers("group_size")
        bits, group = (float(one.reshape(())) for one in numbers)
        axis = int(parts.integers("axis").reshape(()))
        if bits not in PER_UNIT:
            parts.refuse("nbits", f"{bits:g}", ", ".join(map(str, PER_UNIT)))
        if min(rows, size) < 1 or group < 1 or rows * size % int(group):
            found = f"{group:g} for a matrix {[rows, size]}"
            parts.refuse("group_size", found, "a divisor of its size")
        if axis not in (0, 1):
            parts.refuse("axis", str(axis), "0 or 1")
        return (rows, size), int(bits), int(group), axis
