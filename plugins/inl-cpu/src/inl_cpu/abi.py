"""Python's side of ``native/inl.h``: opcodes, flags, kinds, and how structs lie.

``tests/plugins/cpu/test_abi.py`` compares all of it with what the library says of
itself. Imports nothing heavy, for a probe reads it.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum, IntFlag
from typing import Final

ABI: Final = 1
DIMS: Final = 10
DATA: Final = 20
REALS: Final = 4
LANES: Final = 16
"""Rows of a tile of a matrix."""

INSTRUCTION: Final = struct.Struct(f"=2i{DIMS}q{DATA}Q{REALS}f")
"""opcode, flags, dims, data, reals."""


class Opcode(IntEnum):
    """What an instruction does; the header says with which dims, data and reals."""

    ZERO = 0
    COPY = 1
    ADD = 2
    SUB = 3
    MUL = 4
    SCALE = 5
    EMBEDDING = 6
    RMS_NORM = 7
    ADD_NORM = 8
    LINEAR = 9
    GATED = 10
    ROPE = 11
    ROPE_TABLE = 12
    ATTENTION = 13
    WRITE_KV = 14
    READ_CACHE = 15
    FILL_CACHE = 16
    COPY_BLOCKS = 17
    TAKE_ROWS = 18
    CHOOSE = 19
    PENALIZE = 20
    PACK = 21
    READ = 22


class Flag(IntFlag):
    """How an instruction does it."""

    X_EXACT = 0
    X_INT8 = 1
    X_INT16 = 2
    X_BF16 = 3
    GATE_SILU = 4
    GATE_GELU = 8
    PLUS_ONE = 16
    KV_BF16 = 32
    ONE_EACH = 64
    SAMPLE_GREEDY = 0
    SAMPLE_DRAW = 128
    SAMPLE_FULL = 256
    INTERLEAVE = 512
    ANY_BITS = 1024
    KV_INT8 = 16384


class Format(IntEnum):
    """How the numbers of a matrix are held."""

    F32 = 0
    BF16 = 1
    U4 = 2
    U8 = 3
    F16 = 4


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
}
"""Dtypes of a checkpoint that can be packed as they are stored."""

ISAS: Final = ("scalar", "avx2", "avx512", "amx", "neon")
"""Instruction sets by number."""


class MatrixStruct(ctypes.Structure):
    """Weights in tiles, as the kernels read them."""

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
