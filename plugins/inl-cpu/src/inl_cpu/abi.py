"""Constants and struct layouts of the native library's C interface.

``native/runtime/inl.h`` is the C side, ``instructions.py`` lists the instructions. A
test compares both sides. Imports neither NumPy nor a framework, because probes use it.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum, IntFlag
from typing import Final

ABI: Final = 5
DIMS: Final = 10
DATA: Final = 20
REALS: Final = 4
LANES: Final = 16
"""Rows of a matrix tile."""

INSTRUCTION: Final = struct.Struct(f"=2i{DIMS}q{DATA}Q{REALS}f")
"""opcode, flags, dims, data, reals."""


class Flag(IntFlag):
    """Variants of an instruction; the instruction table says which ones it accepts."""

    X_EXACT = 0
    """Linear: x in float32. Scales of the integer modes are smaller than what they
    scale: groups of x below 1e-33 lose digits."""
    X_INT8 = 1
    """Linear: x as int8 with a scale for each group, and a second plane for groups with
    outliers; for quantized weights."""
    X_INT16 = 2
    """Linear: x as two planes of int8, 15 bits; for quantized weights."""
    X_BF16 = 3
    """Linear: x rounded to bfloat16."""
    X_MASK = 3
    GATE_SILU = 4
    GATE_GELU = 8
    """The tanh approximation."""
    GATE_MASK = 12
    PLUS_ONE = 16
    """Norms multiply by 1 + weight."""
    KV_BF16 = 32
    """The cache holds bfloat16; without a KV flag, float32."""
    ONE_TOKEN_ROWS = 64
    """Attention: no row has more than one token."""
    SAMPLE_GREEDY = 0
    SAMPLE_RANDOM = 128
    """Sample with a temperature."""
    SAMPLE_FILTERED = 256
    """Sample with a temperature after top-k, top-p and min-p."""
    SAMPLE_MASK = 384
    INTERLEAVE = 512
    BATCH_VARIANT = 1024
    """Results of a row may depend on the batch: permits AMX, which rounds otherwise."""
    REQUANTIZE = 2048
    """Linear: many rows may be multiplied with weights rounded to int8 with a scale for
    64 columns, and x with one for 256, where that is faster."""
    KV_INT8 = 16384
    """The cache holds int8 with a scale for each token and head."""
    KV_FLOAT8 = 32768
    """The cache holds float8 (e4m3), times the instruction's two scales."""


class Format(IntEnum):
    """Number format of a matrix: plain numbers, or codes and how many bits they have.

    N4 and M4 are 4-bit indices of the tables of iq4_nl and of mxfp4; IQ1 and IQ2, of
    3 bits, and IQ3, of 4 bits, of those of the GGUF kinds that have a codebook.
    """

    F32 = 0
    BF16 = 1
    U2 = 2
    U3 = 3
    U4 = 4
    U5 = 5
    U6 = 6
    U8 = 7
    N4 = 8
    M4 = 9
    IQ1 = 10
    IQ2 = 11
    IQ3_XXS = 12
    IQ3_S = 13


class Scale(IntEnum):
    """Scales of a quantized matrix, ``inl_scale`` in C."""

    HALF = 0
    BYTE = 1
    NIBBLE = 2
    EXPONENT = 3
    SIX = 4
    WIDE = 5
    EIGHTHS = 6


KINDS: Final = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "q4_0": 3,
    "q4_1": 4,
    "q5_0": 5,
    "q5_1": 6,
    "q8_0": 7,
    "q2_k": 8,
    "q3_k": 9,
    "q4_k": 10,
    "q5_k": 11,
    "q6_k": 12,
    "iq4_nl": 13,
    "iq4_xs": 14,
    "mxfp4": 15,
    "tq1_0": 16,
    "tq2_0": 17,
    "iq1_s": 18,
    "iq1_m": 19,
    "iq2_xxs": 20,
    "iq2_xs": 21,
    "iq2_s": 22,
    "iq3_xxs": 23,
    "iq3_s": 24,
}
"""Number of each checkpoint dtype that PACK reads, ``inl_kind`` in C."""

ISAS: Final = ("scalar", "avx2", "avx512", "amx", "neon", "avx_vnni")
"""Instruction sets; the index is the number that the library uses."""


class MatrixStruct(ctypes.Structure):
    """A weight matrix in tiles, ``inl_matrix`` in C."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("offsets", ctypes.c_int32),
        ("middle", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )
