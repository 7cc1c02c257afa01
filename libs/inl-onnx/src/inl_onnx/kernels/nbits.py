"""Products with 4-bit weights as stored in the checkpoint: ``MatMulNBits``.

The operator computes ``scale * (code - 8)``. Formats with an offset add a product of
the sums of 32 inputs with ``offset + 8 * scale``, so that no code is rounded.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from inl.dtypes import HostArray, wrap
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.spec.kernel import Kernel
from inl.weights.packing import packer, refuse_dtypes
from inl_onnx import functions as fn
from inl_onnx.graph import CONTRIB, Value
from inl_onnx.kernels.kernel import kernel
from inl_onnx.kernels.layers import gated_activation, product

LAYOUT: Final = "nbits"
GROUP: Final = 32
"""Codes that share a scale."""

HEADERS: Final = {"q4_0": 1, "q4_1": 2}
"""Format -> float16 numbers before the codes of a group: the scale, and the offset."""


class NBits(NamedTuple):
    """A matrix [N, K]."""

    codes: Any
    """uint8 [N, K / 32, 16]: two codes per byte, the first in the low half."""
    scales: Any
    """[N, K / 32] in the compute dtype."""
    offsets: Any = None
    """float32 [N, K / 32], with eight times the scale added; ``None`` is zero."""


can_pack = refuse_dtypes(*HEADERS)


def nbits_product(x: Value, w: NBits, bias: Value | None = None) -> Value:
    """``x`` [T, K] @ the matrix, transposed: [T, N]."""
    rows, groups, _ = w.codes.shape
    tokens, columns = x.shape
    sizes = {"N": rows, "K": columns, "bits": 4, "block_size": GROUP}
    operands = [w.codes, w.scales]
    y = x.node("MatMulNBits", *operands, shape=(tokens, rows), domain=CONTRIB, **sizes)
    if w.offsets is not None:
        sums = fn.sum_of(fn.upcast(x).reshape(tokens, groups, GROUP))
        y = (fn.upcast(y) + product(sums, w.offsets)).astype(x.dtype)
    return y if bias is None else y + bias


def linear(x: Value, w: Linear) -> Value:
    return nbits_product(x, w.weight, w.bias)


def qkv_linear(x: Value, w: QkvLinear) -> tuple[Value, Value, Value]:
    return (
        nbits_product(x, w.q, w.q_bias),
        nbits_product(x, w.k, w.k_bias),
        nbits_product(x, w.v, w.v_bias),
    )


def gated_mlp(x: Value, w: GatedMlp, *, activation: str) -> Value:
    gate, up = nbits_product(x, w.gate), nbits_product(x, w.up)
    return nbits_product(gated_activation(gate, up, activation=activation), w.down)


def packed(matrix: HostArray, backend: Any, dtype: str) -> NBits:
    """Copy a quantized matrix to the device, its bits in the order of the operator."""
    rows, columns = matrix.shape
    header = HEADERS[matrix.dtype]
    blocks = matrix.data.reshape(rows, columns // GROUP, -1)
    floats = np.ascontiguousarray(blocks[..., : 2 * header]).view(np.float16)
    halves = blocks[..., 2 * header :]
    codes = np.concatenate([halves & 15, halves >> 4], -1)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    scales = floats[..., 0]
    offsets = None
    if header > 1:
        shifted = floats[..., 1].astype(np.float32) + 8 * scales.astype(np.float32)
        offsets = backend.tensor(wrap(shifted))
    make = backend.runtime.tensor
    return NBits(
        make(wrap(pairs), constant=True),
        make(wrap(scales.astype(dtype)), constant=True),
        offsets,
    )


KERNELS: tuple[Kernel, ...] = tuple(
    kernel(
        run,
        technology="nbits",
        layout=LAYOUT,
        pack=packer(run.__name__, LAYOUT, packed),
        can_pack=can_pack,
        preference=1,
    )
    for run in (linear, qkv_linear, gated_mlp)
)
