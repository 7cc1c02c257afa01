"""Constants and struct layouts in Python equal those of the native library."""

from __future__ import annotations

import ctypes
import json

import pytest

from inl_cpu import abi
from inl_cpu.instructions import Opcode
from inl_cpu.library import open_library


@pytest.fixture(scope="module")
def described():
    found = open_library()
    if found.library is None:
        pytest.skip(found.reason)
    return json.loads(found.library.inl_describe())


def test_the_version(described):
    assert described["abi"] == abi.ABI


def test_instruction_layout(described):
    where = described["instruction"]
    assert where["size"] == abi.INSTRUCTION.size
    dims = [100 + n for n in range(abi.DIMS)]
    data = [200 + n for n in range(abi.DATA)]
    reals = [0.5 + n for n in range(abi.REALS)]
    packed = abi.INSTRUCTION.pack(7, 9, *dims, *data, *reals)

    def read(kind, name, count=1):
        return list((kind * count).from_buffer_copy(packed, where[name]))

    assert read(ctypes.c_int32, "opcode") == [7]
    assert read(ctypes.c_int32, "flags") == [9]
    assert read(ctypes.c_int64, "dims", abi.DIMS) == dims
    assert read(ctypes.c_uint64, "data", abi.DATA) == data
    assert read(ctypes.c_float, "reals", abi.REALS) == reals


def test_matrix_layout(described):
    where = dict(described["matrix"])
    assert where.pop("size") == ctypes.sizeof(abi.MatrixStruct)
    for name, offset in where.items():
        assert getattr(abi.MatrixStruct, name).offset == offset, name


def test_opcodes(described):
    names = {name.removeprefix("INL_"): n for name, n in described["opcodes"].items()}
    assert names == {opcode.name: opcode.value for opcode in Opcode}


def test_flags(described):
    names = {name.removeprefix("INL_"): n for name, n in described["flags"].items()}
    assert names == {name: int(flag) for name, flag in abi.Flag.__members__.items()}


def test_formats_scales_kinds_and_instruction_sets(described):
    formats = {n.removeprefix("INL_"): v for n, v in described["formats"].items()}
    assert formats == {each.name: each.value for each in abi.Format}
    scales = {n.removeprefix("INL_SCALE_"): v for n, v in described["scales"].items()}
    assert scales == {each.name: each.value for each in abi.Scale}
    kinds = {n.removeprefix("INL_KIND_"): v for n, v in described["kinds"].items()}
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    assert kinds == {short.get(n, n).upper(): v for n, v in abi.KINDS.items()}
    isas = {n.removeprefix("INL_").lower(): v for n, v in described["isas"].items()}
    assert isas == {name: number for number, name in enumerate(abi.ISAS)}
