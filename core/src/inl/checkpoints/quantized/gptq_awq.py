"""GPTQ (Frantar et al., 2022) and AWQ (Lin et al., 2023): codes in 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np

from inl.checkpoints.quantized.matrix import QuantMatrix, unpack_words
from inl.checkpoints.quantized.matrix_format import (
    MatrixFormat,
    Parts,
    Shape,
    columns_of,
    group_width,
    option,
)

HALVES: Final = ("float16", "bfloat16", "float32")
AWQ_ORDER: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each column's code in a word of AWQ."""

EXACT: Final = {"q4_1": "q8_0"}
"""Dtypes that store what another one rounds."""


class WordFormat(MatrixFormat):
    """Common to both: scales and zeros [G, N] of groups of input columns."""

    marker = ".qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    bits: int
    width: int
    repacked: str
    """Dtype of matrices whose groups are runs of columns."""

    def _spec(self, parts: Parts, shape: Shape) -> tuple[str, Shape]:
        rows, size = shape
        width = size if self.width == -1 else self.width
        groups = -(-size // width)
        parts.check("qzeros", (groups, rows * self.bits // 32), dtypes=("int32",))
        parts.check("scales", (groups, rows), dtypes=HALVES)
        ordered = False
        if parts.has("g_idx"):
            parts.check("g_idx", (size,), (0,), dtypes=("int32", "int64"))
            if parts.shape("g_idx") == (size,):
                ordered = columns_of(parts, "g_idx", width, groups) is not None
        repacked = parts.blocks(
            self.repacked, "scales", width, size, exact=EXACT.get(self.repacked)
        )
        return "float32" if ordered else repacked, shape

    def _matrix(self, parts: Parts, codes: Any, zeros: Any, size: int) -> QuantMatrix:
        width = size if self.width == -1 else self.width
        scales = parts.floats("scales")
        ordered = parts.has("g_idx") and parts.shape("g_idx") == (size,)
        columns = columns_of(parts, "g_idx", width, len(scales)) if ordered else None
        return QuantMatrix(
            np.ascontiguousarray(codes.T),
            np.ascontiguousarray(scales.T),
            np.ascontiguousarray(zeros.T).astype(np.int32),
            columns=columns,
            width=width,
        )


@final
class Gptq(WordFormat):
    """Words along the input columns; zeros are stored minus 1 in version 1."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = option(config, "bits", (2, 3, 4, 8))
        self.width = group_width(config)
        form = option(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        symmetric = option(config, "sym", (True, False), True)
        self._shift = form == "gptq"
        small = "q4_0" if symmetric else "q4_1"
        self.repacked = small if self.bits <= 4 else "q8_0"
        if not symmetric and self.bits == 8:
            self.repacked = "float32"
        ordered = ", act-order" if config.get("desc_act") else ""
        self.name = f"GPTQ, {self.bits} bits, groups of {self.width}{ordered}"

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        words, rows = _two_axes(parts)
        for part, count in (("qweight", words), ("qzeros", parts.shape("qzeros")[-1])):
            if self.bits == 3 and count % 3:
                parts.refuse(part, f"{count} words", "a multiple of 3 for 3 bits")
        return self._spec(parts, (rows, words * 32 // self.bits))

    def matrix(self, parts: Parts) -> QuantMatrix:
        codes = unpack_words(parts.integers("qweight"), self.bits, axis=0)
        zeros = unpack_words(parts.integers("qzeros"), self.bits)
        if self._shift:
            zeros = zeros + np.uint8(1) & np.uint8(2**self.bits - 1)
        return self._matrix(parts, codes, zeros, len(codes))


@final
class Awq(WordFormat):
    """Words along the output rows, their codes in an order of their own."""

    bits = 4
    repacked = "q4_1"

    def __init__(self, config: Mapping[str, Any]) -> None:
        option(config, "bits", (4,), 4)
        option(config, "version", ("gemm", "GEMM"), "gemm")
        self.width = group_width(config)
        self.name = f"AWQ, 4 bits, groups of {self.width}"

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        size, words = _two_axes(parts)
        return self._spec(parts, (words * 8, size))

    def matrix(self, parts: Parts) -> QuantMatrix:
        codes, zeros = (
            unpack_words(parts.integers(part), 4)
            .reshape(parts.shape(part)[0], -1, 8)[:, :, AWQ_ORDER]
            .reshape(parts.shape(part)[0], -1)
            for part in ("qweight", "qzeros")
        )
        return self._matrix(parts, codes, zeros, len(codes))


def _two_axes(parts: Parts) -> tuple[int, int]:
    shape = parts.shape("qweight")
    if len(shape) != 2 or parts.dtype("qweight") != "int32":
        parts.refuse(
            "qweight", f"{parts.dtype('qweight')} {list(shape)}", "int32 of 2 axes"
        )
    return shape[0], shape[1]
