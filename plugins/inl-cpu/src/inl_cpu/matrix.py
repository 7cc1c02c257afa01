"""Weights in the tiles that the kernels read, packed from a checkpoint's own bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.dtypes import SIZES, HostArray
from inl.errors import DeviceError, OutOfMemory
from inl.weights.quant import convert
from inl_cpu.abi import KINDS, LANES, Flag, Format, MatrixStruct, Opcode
from inl_cpu.memory import address
from inl_cpu.recording import Addressed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.command_emitter import Stage

PLAIN: Final = ("float32", "bfloat16", "float16")


VARIABLE: Final = "INL_CPU_INPUTS"
"""Environment variable: how "bfloat16" rounds what quantized weights multiply."""

QUANTIZED: Final = {"int8": Flag.X_INT8, "int16": Flag.X_INT16}
"""What it accepts, the default first, and how a product then holds that."""


def inputs_asked_for() -> str:
    """Read INL_CPU_INPUTS; raises :class:`DeviceError` for what it does not accept."""
    found = os.environ.get(VARIABLE, "") or "int8"
    if found not in QUANTIZED:
        raise DeviceError(
            f"environment variable {VARIABLE}: found {found!r:.80}, "
            f"accepted: {', '.join(QUANTIZED)}"
        )
    return found


class Packing(NamedTuple):
    """What the tiles of a matrix hold; matrices of equal packing can be stacked."""

    format: int
    group: int = 0
    zero: int = 0
    scale: int = 0
    offsets: int = 0
    middle: int = 0

    @property
    def quantized(self) -> bool:
        """Whether groups of codes share a scale."""
        return self.format in (Format.U4, Format.U8)


class Held(NamedTuple):
    """Flags for how a product holds its other operand."""

    invariant: int
    """Where bits must not depend on the batch: no coarser than needed for bfloat16."""
    usual: int


class Matrix(Addressed):
    """One packed matrix; to the runtime a tensor of bytes."""

    dtype = "uint8"

    def __init__(
        self, packing: Packing, rows: int, columns: int, held: Held, stage: Stage
    ) -> None:
        self.packing, self.rows, self.columns = packing, rows, columns
        self.held = held
        self._struct = MatrixStruct(*packing, rows, columns, None)
        size = stage.machine.library.inl_matrix_bytes(ctypes.byref(self._struct))
        assert size >= 0, f"no tiles of {packing} [{rows}, {columns}]"
        found = stage.kept.find(self, size) if stage.kept else None
        self.kept = found is not None
        """Whether it is full already, from an earlier start."""
        self.data = taken(stage, size) if found is None else found
        self._struct.data = address(self.data)
        self.address = ctypes.addressof(self._struct)
        self.shape = (size,)

    def fill(
        self, source: HostArray, stage: Stage, *, first: int = 0, flags: int = 0
    ) -> None:
        """Pack the rows of ``source`` from row ``first`` on."""
        if self.kept and stage.kept:
            stage.kept.compare(self, source, first, flags)
            return
        source = readable(source, self.packing)
        data = np.ascontiguousarray(source.data)
        kind = KINDS[source.dtype]
        dims = [source.shape[0], self.columns, first, kind]
        stage.emit(Opcode.PACK, dims, [data, self], flags=flags)


def taken(stage: Stage, size: int) -> NDArray[np.uint8]:
    """Aligned bytes for weights, all zero; raises :class:`OutOfMemory`."""
    try:
        return stage.weights.take(size)
    except MemoryError as error:
        raise OutOfMemory(
            f"weights: {size} bytes ({size / 2**20:.1f} MiB) do not fit; "
            "take a smaller model"
        ) from error


def packing_of(array: HostArray, dtype: str, stage: Stage) -> Packing:
    """What an array is packed into for computing in ``dtype``."""
    if array.dtype in KINDS and array.dtype not in PLAIN:
        struct = MatrixStruct()
        known = stage.machine.library.inl_packing(
            KINDS[array.dtype], ctypes.byref(struct)
        )
        if known == 0 and struct.group and array.shape[-1] % struct.group == 0:
            return Packing(*(getattr(struct, name) for name in Packing._fields))
    # A number of bfloat16 is a float32 as it stands: half the bytes for the same bits.
    narrow = dtype == "bfloat16" or array.dtype == "bfloat16"
    return Packing(Format.BF16 if narrow else Format.F32)


def held_for(packing: Packing, dtype: str) -> Held:
    """How products hold the other operand: exactly in float32, else cheaply."""
    if dtype == "bfloat16" and packing.quantized:
        return Held(int(Flag.X_INT16), int(QUANTIZED[inputs_asked_for()]))
    narrow = dtype == "bfloat16" and packing.format == Format.BF16
    flag = Flag.X_BF16 if narrow else Flag.X_EXACT
    return Held(int(flag), int(flag))


def readable(array: HostArray, packing: Packing) -> HostArray:
    """An array that INL_PACK reads into ``packing``; decoded where it must be."""
    if packing.quantized or array.dtype in PLAIN:
        return array
    return convert(array, "bfloat16" if packing.format == Format.BF16 else "float32")


def pack_rows(
    sources: Sequence[HostArray], dtype: str, stage: Stage
) -> tuple[Matrix, ...]:
    """Put matrices below each other in one; one each where they are packed unlike."""
    packings = [packing_of(source, dtype, stage) for source in sources]
    if len(set(packings)) > 1:
        return tuple(pack_rows([source], dtype, stage)[0] for source in sources)
    place = place_of(sources[0], dtype) if len(sources) == 1 else None
    if place is not None and (known := stage.shared.get(place)):
        return (known,)
    rows = sum(source.shape[0] for source in sources)
    held = held_for(packings[0], dtype)
    matrix = Matrix(packings[0], rows, sources[0].shape[1], held, stage)
    first = 0
    for source in sources:
        matrix.fill(source, stage, first=first)
        first += source.shape[0]
    if place is not None:
        stage.shared[place] = matrix
    return (matrix,)


def pack_pairs(
    gate: HostArray, up: HostArray, dtype: str, stage: Stage
) -> tuple[Matrix, ...]:
    """Sixteen rows of gate, sixteen of up in turn; two matrices if packed unlike."""
    packings = [packing_of(source, dtype, stage) for source in (gate, up)]
    if packings[0] != packings[1]:
        return tuple(pack_rows([source], dtype, stage)[0] for source in (gate, up))
    rows = 2 * LANES * -(-gate.shape[0] // LANES)
    held = held_for(packings[0], dtype)
    matrix = Matrix(packings[0], rows, gate.shape[1], held, stage)
    for first, source in ((0, gate), (LANES, up)):
        matrix.fill(source, stage, first=first, flags=int(Flag.INTERLEAVE))
    return (matrix,)


Place = tuple[mmap, int, str, str, tuple[int, ...]]


def place_of(source: HostArray, dtype: str) -> Place | None:
    """Where in a mapped file an array lies, so that tied weights are packed once."""
    base: Any = source.data
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap):
        return None
    # The map itself is part of the key: its addresses cannot become another's.
    return base, address(source.data), source.dtype, dtype, source.shape


def packable(name: str, shape: tuple[int, ...], dtype: str) -> str | None:
    """``None``, or why a tensor cannot be laid out in tiles."""
    if len(shape) != 2 or min(shape) < 1:
        return f"{name} of shape {list(shape)} is no matrix"
    if dtype not in SIZES and dtype not in KINDS:
        from inl.weights.quant import BLOCKS

        return None if dtype in BLOCKS else f"{name} of an unknown dtype, {dtype}"
    return None
