"""The instruction table: generated header, operand access, encoding, and errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from inl_cpu.abi import DATA, DIMS, INSTRUCTION, Flag
from inl_cpu.encoding import INSTRUCTIONS, Access, Dim, Instruction, Operand
from inl_cpu.instructions import Linear, Opcode, Penalize, Scale
from inl_cpu.library import open_library

PACKAGE = Path(__file__).parents[3] / "plugins" / "inl-cpu"


@pytest.fixture(scope="module")
def generator():
    path = PACKAGE / "generate_instructions.py"
    spec = importlib.util.spec_from_file_location("generate_instructions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_header_is_up_to_date(generator):
    assert generator.HEADER.read_text() == generator.header(), (
        "run plugins/inl-cpu/generate_instructions.py"
    )


def test_opcodes_are_consecutive():
    assert sorted(INSTRUCTIONS) == list(range(len(INSTRUCTIONS)))
    assert {opcode.value for opcode in Opcode} == set(INSTRUCTIONS)


@pytest.mark.parametrize("cls", INSTRUCTIONS.values(), ids=lambda cls: cls.__name__)
def test_every_instruction_writes_and_is_documented(cls):
    spec = cls.spec()
    assert spec.doc
    assert any(field.access != Access.READ for field in spec.data)
    assert len({*spec.dims, *spec.reals, *(f.name for f in spec.data)}) == len(
        spec.dims + spec.reals + spec.data
    )


def test_an_instruction_needs_an_opcode_of_its_own():
    with pytest.raises(TypeError, match="opcode"):

        class Nameless(Instruction):
            count: Dim

    with pytest.raises(TypeError, match="Instruction: not in the instruction table"):
        Instruction().encoded()
    with pytest.raises(TypeError, match="Twice: opcode 9 belongs to Linear"):

        class Twice(Instruction, opcode=9):
            count: Dim


def test_fields_are_encoded_by_position():
    x, y = Operand(1000), Operand(2000)
    scale = Scale(count=7, x=x, y=y, factor=0.5, offset=-1.0, flags=0)
    opcode, flags, *rest = INSTRUCTION.unpack(scale.encoded())
    assert (opcode, flags) == (Opcode.SCALE, 0)
    dims, data, reals = np.split(np.array(rest), [DIMS, DIMS + DATA])
    assert dims.tolist() == [7] + [0] * (DIMS - 1)
    assert data.tolist() == [1000, 2000] + [0] * (DATA - 2)
    assert reals.tolist() == [0.5, -1, 0, 0]


def test_operands_are_those_of_the_declaration():
    x, y = Operand(1000), Operand(2000)
    with pytest.raises(
        TypeError, match=r"Scale: missing=\['factor'\], unknown=\['z'\]"
    ):
        Scale(count=7, x=x, y=y, z=y)
    scale = Scale(count=7, x=x, y=y, factor=0.5)
    assert scale.offset == 0
    assert scale.replace(offset=2.0).offset == 2
    with pytest.raises(AttributeError, match=r"Scale\.count: cannot be changed"):
        scale.count = 8
    assert "count=7" in repr(scale)


def linear(**operands):
    given = {"x": Operand(8, 1, 8), "matrix": Operand(16), "y": Operand(24, 2, 24)}
    return Linear(rows=1, x_stride=4, y_stride=4, **given | operands)


def test_reads_exclude_results():
    assert linear().reads() == {0, 1}
    assert linear(sum=Operand(32, 3, 32), delta=Operand(40, 4, 40)).reads() == {0, 1, 4}


def test_updated_operands_count_as_read():
    fields = {field.name: field.access for field in Penalize.spec().data}
    assert fields["logits"] == fields["counts"] == Access.UPDATE
    operands = {name: Operand(8 * n, n, 8 * n) for n, name in enumerate(fields, 1)}
    penalize = Penalize(
        rows=1, vocabulary=1, logits_stride=1, decode_rows=0, **operands
    )
    assert penalize.reads() == set(range(1, 7))


def test_outputs_must_not_share_a_block_with_another_operand():
    assert linear().has_distinct_outputs()
    assert not linear(sum=Operand(8, 3, 8)).has_distinct_outputs()
    assert not linear(sum=Operand(24, 3, 24)).has_distinct_outputs()


@pytest.mark.skipif(open_library().library is None, reason=open_library().reason)
def test_unsupported_flags_are_refused(backend):
    from inl.errors import KernelFailed

    x = np.ones(4, np.float32)
    call = Scale(count=4, x=x, y=x, factor=1.0, flags=int(Flag.PLUS_ONE))
    with pytest.raises(KernelFailed, match="scale: does not accept flags 16"):
        backend.emitter.emit(call)
