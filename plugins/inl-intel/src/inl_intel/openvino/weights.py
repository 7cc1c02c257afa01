"""Matrices of a quantized checkpoint as constants that stay compressed in the graph.

OpenVINO's CPU plugin multiplies with codes of 4 and 8 bits where a constant is
converted, has its zero point subtracted, is scaled and reshaped to the matrix.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from inl.checkpoints.blocks.codes import split_blocks, unpack_nibbles
from inl.dtypes import HostArray

GROUP: Final = 32
"""Codes that share a scale."""


class Codes:
    """A matrix [N, K] as codes: ``scale * (code - zero)``.

    values: int8 [N, K], or uint8 [N, K / 2], two codes of 4 bits per byte, the first in
    the low half. scales: float32 [N, K / 32, 1]. zeros: the same shape; ``None`` is 0.
    """

    def __init__(self, values: Any, scales: Any, zeros: Any = None) -> None:
        self.values, self.scales, self.zeros = values, scales, zeros
        groups = scales.shape[1]
        self.shape = values.shape[0], groups * GROUP
        self.dtype = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return int(self.values.nbytes + self.scales.nbytes + zeros)

    def node(self) -> Any:
        """Return the nodes that decode the matrix, float32 [N, K]."""
        rows, columns = self.shape
        shape = ov.Shape([rows, columns // GROUP, GROUP])
        if self.values.dtype == np.uint8:
            codes = ops.constant(ov.Tensor(self.values, shape, ov.Type.u4))
        else:
            codes = ops.constant(self.values.reshape(tuple(shape)), shared_memory=True)
        x = ops.convert(codes, "f32")
        if self.zeros is not None:
            x = ops.subtract(x, ops.constant(self.zeros, shared_memory=True))
        x = ops.multiply(x, ops.constant(self.scales, shared_memory=True))
        target = ops.constant(np.array([rows, columns], np.int64))
        return ops.reshape(x, target, False)


def codes_of(matrix: HostArray) -> Codes:
    """Split a stored matrix of one of the formats :data:`SPLIT`; nothing is rounded
    but the zero point, to float32.
    """
    values, scales, offsets = split_blocks(matrix)
    scales = scales.astype(np.float32)[:, :, None]
    zeros = None
    if values.dtype == np.uint8:
        codes = unpack_nibbles(values)
        values = codes[:, ::2] | codes[:, 1::2] << 4
        zeros = np.full(scales.shape, 8, np.float32)
    if offsets is not None:
        offsets = offsets.astype(np.float32)[:, :, None]
        # A group with a scale of 0 has one number: its codes are multiplied by 0.
        flat = scales == 0
        zeros = np.where(flat, 0, -offsets / np.where(flat, 1, scales))
        if (flat & (offsets != 0)).any():
            values, scales, zeros = without_flat(values, scales, zeros, offsets, flat)
    return Codes(values, scales, zeros)


def without_flat(
    values: Any, scales: Any, zeros: Any, offsets: Any, flat: Any
) -> tuple[Any, Any, Any]:
    """Return codes of 0 and a scale of 1 for groups whose scale is 0."""
    rows, groups, _ = scales.shape
    kept = np.where(flat, 0, values.reshape(rows, groups, -1))
    return (
        np.ascontiguousarray(kept.reshape(values.shape), values.dtype),
        np.where(flat, np.float32(1), scales),
        np.where(flat, -offsets, zeros),
    )
