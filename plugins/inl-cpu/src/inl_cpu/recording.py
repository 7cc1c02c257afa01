"""A program as it is recorded: native calls and Python steps, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inl_cpu.abi import DATA, DIMS, INSTRUCTION, REALS, Opcode
from inl_cpu.memory import Arena, Scratch, address, lease_of

WRITTEN: dict[Opcode, tuple[int, ...]] = {
    Opcode.ZERO: (0,),
    Opcode.COPY: (1,),
    Opcode.ADD: (2,),
    Opcode.SUB: (2,),
    Opcode.MUL: (2,),
    Opcode.SCALE: (1,),
    Opcode.EMBEDDING: (2,),
    Opcode.RMS_NORM: (2,),
    Opcode.ADD_NORM: (3, 4),
    Opcode.LINEAR: (3, 6),
    Opcode.GATED: (2,),
    Opcode.ROPE: (3,),
    Opcode.ROPE_TABLE: (2, 3),
    Opcode.ATTENTION: (3, 4, 5),
    Opcode.WRITE_KV: (2, 3),
    Opcode.TAKE_ROWS: (2,),
    Opcode.CHOOSE: (1, 3),
    Opcode.PENALIZE: (0, 3),
}
"""Which data of an instruction it writes; it reads all others."""


class Operand(NamedTuple):
    """A place in memory that an instruction names."""

    address: int = 0
    lease: int = 0
    """Number of its loan; 0 where the memory lasts."""
    block: int = 0
    """Where the block of its loan begins; later loans may be of the same."""


@dataclass(frozen=True, slots=True)
class Call:
    """One instruction, before it is written out."""

    opcode: Opcode
    dims: tuple[int, ...]
    data: tuple[Operand, ...]
    reals: tuple[float, ...] = ()
    flags: int = 0

    def packed(self) -> bytes:
        """The instruction as the library reads it."""
        dims = (*self.dims, *(0,) * (DIMS - len(self.dims)))
        places = [operand.address for operand in self.data]
        places += [0] * (DATA - len(places))
        reals = (*self.reals, *(0.0,) * (REALS - len(self.reals)))
        return INSTRUCTION.pack(int(self.opcode), self.flags, *dims, *places, *reals)

    def at(self, index: int) -> Operand:
        """Operand ``index``, which may be left out."""
        return self.data[index] if index < len(self.data) else Operand()

    @property
    def reads(self) -> set[int]:
        """Loans that it reads."""
        written = WRITTEN.get(self.opcode, ())
        return {o.lease for n, o in enumerate(self.data) if n not in written}

    @property
    def clear(self) -> bool:
        """Whether each place that it writes is apart from all others of its own."""
        written = WRITTEN.get(self.opcode, ())
        blocks = [operand.block for operand in self.data]
        return all(
            not block or blocks.count(block) == 1
            for place, block in enumerate(blocks)
            if place in written
        )


@dataclass(frozen=True, slots=True)
class PythonStep:
    """Something that NumPy computes between native calls."""

    run: Callable[[], object]
    reads: set[int]


class Addressed:
    """What an instruction may name besides arrays: it tells its address."""

    address: int


Datum = NDArray[Any] | Addressed | None


def operand(datum: Datum) -> Operand:
    """Where something lies, and whose memory that is."""
    if datum is None:
        return Operand()
    if isinstance(datum, np.ndarray):
        lease = lease_of(datum)
        if lease is None:
            return Operand(address(datum))
        return Operand(address(datum), lease.number, lease.address)
    return Operand(datum.address)


def make_call(
    opcode: Opcode,
    dims: Sequence[int],
    data: Sequence[Datum],
    reals: Sequence[float] = (),
    flags: int = 0,
) -> Call:
    """Name the parts of an instruction by what they are now."""
    places = tuple(operand(datum) for datum in data)
    return Call(opcode, tuple(dims), places, tuple(reals), flags)


class Tape:
    """Collects what a program does, and the memory that it does it in."""

    def __init__(self, scratch: Scratch) -> None:
        self.arena = Arena(scratch)
        self.steps: list[Call | PythonStep] = []
        self.kept: list[Any] = []
        """What must live as long as the program."""

    def call(self, call: Call, data: Sequence[Datum]) -> None:
        """Add an instruction; memory of no loan is kept alive."""
        self.steps.append(call)
        self.kept += [
            datum
            for datum, place in zip(data, call.data, strict=True)
            if datum is not None and not place.lease
        ]

    def python(self, run: Callable[[], object], inputs: Sequence[NDArray[Any]]) -> None:
        """Add a step that runs ``run`` and reads ``inputs``."""
        leases = [lease_of(array) for array in inputs]
        reads = {lease.number for lease in leases if lease is not None}
        self.steps.append(PythonStep(run, reads))
