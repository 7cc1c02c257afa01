"""Base class of native instructions: named operands and their binary encoding.

:mod:`inl_cpu.instructions` declares one subclass for each opcode. The annotations below
describe the fields; the order of the fields determines their index in the struct
``inl_instruction``.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import numpy as np
from numpy.typing import NDArray

from inl_cpu.abi import DATA, DIMS, INSTRUCTION, REALS, Flag
from inl_cpu.memory import address, handle_of

D = TypeVar("D")
"""Type of data operands: :data:`Datum` when emitted, :class:`Operand` when recorded."""


class Access(Enum):
    """What an instruction does with the memory of an operand."""

    READ = "read"
    WRITE = "written"
    UPDATE = "read and written"


class DataType(NamedTuple):
    """C type of the elements of a data operand, and how they are accessed."""

    ctype: str
    access: Access


class Scalar(Enum):
    """Kinds of fields that are numbers."""

    DIM = "dim"
    REAL = "real"


Dim = Annotated[int, Scalar.DIM]
"""int64: a size, a stride in elements, or an index. Must not be negative."""
Real = Annotated[float, Scalar.REAL]
"""float32."""
ReadF32 = Annotated[D, DataType("float", Access.READ)]
WriteF32 = Annotated[D, DataType("float", Access.WRITE)]
UpdateF32 = Annotated[D, DataType("float", Access.UPDATE)]
ReadF64 = Annotated[D, DataType("double", Access.READ)]
ReadI32 = Annotated[D, DataType("int32_t", Access.READ)]
WriteI32 = Annotated[D, DataType("int32_t", Access.WRITE)]
UpdateI32 = Annotated[D, DataType("int32_t", Access.UPDATE)]
ReadU32 = Annotated[D, DataType("uint32_t", Access.READ)]
WriteU64 = Annotated[D, DataType("uint64_t", Access.WRITE)]
ReadBytes = Annotated[D, DataType("char", Access.READ)]
UpdateBytes = Annotated[D, DataType("char", Access.UPDATE)]
ReadMatrix = Annotated[D, DataType("inl_matrix", Access.READ)]
UpdateMatrix = Annotated[D, DataType("inl_matrix", Access.UPDATE)]


class DataField(NamedTuple):
    """A data operand of an instruction."""

    name: str
    ctype: str
    access: Access
    optional: bool


class InstructionSpec(NamedTuple):
    """An entry of the instruction table."""

    name: str
    opcode: int
    dims: tuple[str, ...]
    data: tuple[DataField, ...]
    reals: tuple[str, ...]
    flags: Flag
    """The flags that the instruction accepts."""
    doc: str


class Operand(NamedTuple):
    """A memory address that a recorded instruction uses."""

    address: int
    buffer: int = 0
    """Number of the scratch buffer (see :class:`inl_cpu.memory.BufferHandle`);
    0 for memory that outlives the program."""
    block: int = 0
    """Address of the scratch block; several buffers may use one block in turn."""


class Addressed:
    """An operand other than an array: an object with an address."""

    address: int


Datum = NDArray[Any] | Addressed


def operand_of(datum: Datum) -> Operand:
    """Address of an array or object, and the scratch buffer that it belongs to."""
    if not isinstance(datum, np.ndarray):
        return Operand(datum.address)
    handle = handle_of(datum)
    if handle is None:
        return Operand(address(datum))
    return Operand(address(datum), handle.number, handle.address)


INSTRUCTIONS: dict[int, type[Instruction[Any]]] = {}
"""Every instruction by opcode."""


def _is_class_variable(hint: object) -> bool:
    if isinstance(hint, str):
        return hint.startswith("ClassVar")
    return get_origin(hint) is ClassVar


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Fields:
    """A frozen dataclass with keyword-only fields, without generated methods.

    ``dataclass`` compiles six methods for each subclass, which for all instructions was
    a tenth of the time of all imports of a start. Objects are compared by identity.
    Raises :class:`TypeError` for fields that are missing or unknown.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """The fields, in order."""
    known: ClassVar[frozenset[str]] = frozenset()
    """The same, to look up."""
    required: ClassVar[frozenset[str]] = frozenset()
    """Fields without a default."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = tuple(
            name
            for name, hint in cls.__annotations__.items()
            if not _is_class_variable(hint)
        )
        cls.names = (*cls.names, *own)
        cls.known = frozenset(cls.names)
        cls.required = cls.required | {name for name in own if not hasattr(cls, name)}

    def __init__(self, **values: Any) -> None:
        if not self.required <= values.keys() <= self.known:
            missing = sorted(self.required - values.keys())
            unknown = sorted(values.keys() - self.known)
            raise TypeError(f"{type(self).__name__}: {missing=}, {unknown=}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name}: cannot be changed")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def replace(self, **values: Any) -> Self:
        """A copy with other values."""
        return type(self)(**vars(self) | values)


class Instruction(Fields, Generic[D]):
    """One native instruction with operands by name.

    Raises :class:`TypeError` when a subclass is declared without an opcode, or with
    one that is in use.
    """

    opcode: ClassVar[int]
    accepted_flags: ClassVar[Flag]

    flags: int = 0

    def __init_subclass__(cls, *, opcode: int, flags: Flag = Flag.X_EXACT) -> None:
        if opcode in INSTRUCTIONS:
            raise TypeError(
                f"{cls.__name__}: opcode {opcode} belongs to "
                f"{INSTRUCTIONS[opcode].__name__}"
            )
        super().__init_subclass__()
        cls.opcode, cls.accepted_flags = opcode, flags
        INSTRUCTIONS[opcode] = cls

    @classmethod
    def snake_name(cls) -> str:
        """The name in the instruction table, such as "rms_norm"."""
        letters = (f"_{c.lower()}" if c.isupper() else c for c in cls.__name__)
        return "".join(letters).removeprefix("_")

    @classmethod
    def spec(cls) -> InstructionSpec:
        """The table entry of this class; raises TypeError if it has none."""
        if not hasattr(cls, "opcode"):
            raise TypeError(f"{cls.__name__}: not in the instruction table")
        return _spec_of(cls.opcode)

    def operands(self) -> list[tuple[DataField, D]]:
        """The data operands that are not left out."""
        given = vars(self).get  # the only default of a data operand is None
        return [
            (field, value)
            for field in _spec_of(self.opcode).data
            if (value := given(field.name)) is not None
        ]

    def resolved(self: Instruction[Datum]) -> Instruction[Operand]:
        """The same instruction with addresses in place of arrays."""
        places = {field.name: operand_of(value) for field, value in self.operands()}
        return cast("Instruction[Operand]", self.replace(**places))

    def encoded(self: Instruction[Operand]) -> bytes:
        """The bytes of an ``inl_instruction``."""
        spec = self.spec()
        dims = [getattr(self, name) for name in spec.dims]
        values = [getattr(self, field.name) for field in spec.data]
        places = [0 if value is None else value.address for value in values]
        reals = [getattr(self, name) for name in spec.reals]
        return INSTRUCTION.pack(
            self.opcode,
            self.flags,
            *dims,
            *[0] * (DIMS - len(dims)),
            *places,
            *[0] * (DATA - len(places)),
            *reals,
            *[0.0] * (REALS - len(reals)),
        )

    def reads(self: Instruction[Operand]) -> set[int]:
        """Numbers of the scratch buffers that it reads; 0 for other memory."""
        return {
            operand.buffer
            for field, operand in self.operands()
            if field.access != Access.WRITE
        }

    def has_distinct_outputs(self: Instruction[Operand]) -> bool:
        """Whether no scratch block that it writes is used by another operand."""
        blocks = [operand.block for _, operand in self.operands()]
        return all(
            not operand.block or blocks.count(operand.block) == 1
            for field, operand in self.operands()
            if field.access != Access.READ
        )


@cache
def _spec_of(opcode: int) -> InstructionSpec:
    cls = INSTRUCTIONS[opcode]
    hints = cls.__annotations__
    numbers: dict[Scalar, list[str]] = {Scalar.DIM: [], Scalar.REAL: []}
    data: list[DataField] = []
    for name in cls.names[len(Instruction.names) :]:
        hint, optional = hints[name], False
        if not hasattr(hint, "__metadata__"):
            hint, optional = get_args(hint)[0], True
        (kind,) = hint.__metadata__
        if isinstance(kind, Scalar):
            numbers[kind].append(name)
        else:
            data.append(DataField(name, kind.ctype, kind.access, optional))
    dims, reals = (tuple(numbers[kind]) for kind in (Scalar.DIM, Scalar.REAL))
    for count, limit in ((len(dims), DIMS), (len(data), DATA), (len(reals), REALS)):
        assert count <= limit, f"{cls.__name__}: more fields than inl_instruction has"
    doc = cls.__doc__ or ""
    return InstructionSpec(
        cls.snake_name(), opcode, dims, tuple(data), reals, cls.accepted_flags, doc
    )
