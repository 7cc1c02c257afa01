"""Weight matrices in the tile layout of the kernels, packed from checkpoint data."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inl.checkpoints.blocks.codebooks import codebook
from inl.checkpoints.blocks.dtypes import BLOCKS, convert
from inl.dtypes import SIZES, HostArray
from inl.errors import OutOfMemory
from inl.plugin.environment import environment_choice
from inl_cpu.abi import KINDS, LANES, Flag, Format, MatrixStruct
from inl_cpu.encoding import Addressed
from inl_cpu.instructions import Pack
from inl_cpu.memory import address

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.command_emitter import CommandEmitter

PIECE: Final = 4 << 20
"""Elements that are read and packed at a time, which stay in the processor's cache."""

PLAIN: Final = ("float32", "bfloat16", "float16")
"""Dtypes without quantization."""

VARIABLE: Final = "INL_CPU_INPUTS"
"""Environment variable: precision to which "bfloat16" rounds inputs of quantized
products."""

QUANTIZED: Final = {"int8": Flag.X_INT8, "int16": Flag.X_INT16}
"""Accepted values of the variable, the default first, and the flag of the product."""


def requested_inputs() -> str:
    """Value of INL_CPU_INPUTS; raises :class:`DeviceError` if it is not accepted."""
    return environment_choice(VARIABLE, tuple(QUANTIZED))


class Packing(NamedTuple):
    """Tile format of a matrix; matrices of equal packing can be stacked."""

    format: int
    group: int = 0
    zero: int = 0
    scale: int = 0
    offsets: int = 0
    middle: int = 0

    @property
    def quantized(self) -> bool:
        """Whether the matrix holds codes in groups that share a scale."""
        return self.format not in (Format.F32, Format.BF16)


REQUANTIZED_SIZE: Final = 1024
"""Least rows and columns of a matrix that may be requantized: smaller models lose more
by it."""


class InputPrecision(NamedTuple):
    """Flags for the precision of the other operand of a product."""

    invariant: int
    """For batch-invariant products: no coarser than bfloat16 requires."""
    default: int


class Matrix(Addressed):
    """One packed matrix; to the runtime a tensor of bytes."""

    dtype = "uint8"

    def __init__(
        self,
        packing: Packing,
        rows: int,
        columns: int,
        inputs: InputPrecision,
        emitter: CommandEmitter,
    ) -> None:
        self.packing, self.rows, self.columns = packing, rows, columns
        self.inputs = inputs
        self._struct = MatrixStruct(*packing, rows, columns, None)
        size = emitter.machine.library.inl_matrix_bytes(ctypes.byref(self._struct))
        assert size >= 0, f"no tiles of {packing} [{rows}, {columns}]"
        cache = emitter.weight_cache
        cached = cache.find(self, size) if cache else None
        self.from_cache = cached is not None
        """Whether the data comes from the weight cache, already packed."""
        self.data = allocate_weights(emitter, size) if cached is None else cached
        self._struct.data = address(self.data)
        self.address = ctypes.addressof(self._struct)
        self.shape: tuple[int, ...] = (size,)

    @property
    def requantizes(self) -> bool:
        """Whether products of many rows may round the weights to int8.

        With a scale for 64 columns that adds little to the error of 2 to 6 bits.
        """
        coded = self.packing.quantized and self.packing.format != Format.U8
        return coded and min(self.rows, self.columns) >= REQUANTIZED_SIZE

    def fill(
        self,
        source: HostArray,
        emitter: CommandEmitter,
        *,
        first: int = 0,
        flags: int = 0,
    ) -> None:
        """Pack the rows of ``source`` into rows ``first`` and following."""
        if self.from_cache and emitter.weight_cache:
            emitter.weight_cache.compare(self, source, first, flags)
            return
        spread = 2 if flags & Flag.INTERLEAVE else 1
        for piece in source.pieces(max(1, PIECE // self.columns // LANES) * LANES):
            rows = readable(piece, self.packing)
            emitter.emit(
                Pack(
                    rows=rows.shape[0],
                    columns=self.columns,
                    first=first,
                    kind=KINDS[rows.dtype],
                    source=np.ascontiguousarray(rows.data),
                    matrix=self,
                    codebook=codebook(rows.dtype),
                    flags=flags,
                )
            )
            first += spread * rows.shape[0]


def allocate_weights(emitter: CommandEmitter, size: int) -> NDArray[np.uint8]:
    """Allocate aligned zero bytes for weights; raises :class:`OutOfMemory`."""
    try:
        return emitter.weights.allocate(size)
    except MemoryError as error:
        raise OutOfMemory(
            f"weights: {size} bytes ({size / 2**20:.1f} MiB) do not fit; "
            "take a smaller model"
        ) from error


def packing_of(array: HostArray, dtype: str, emitter: CommandEmitter) -> Packing:
    """Packing of a checkpoint array for computing in ``dtype``."""
    if array.dtype in KINDS and array.dtype not in PLAIN:
        struct = MatrixStruct()
        status = emitter.machine.library.inl_packing(
            KINDS[array.dtype], ctypes.byref(struct)
        )
        if (
            status == 0
            and struct.group
            and array.shape[-1] % BLOCKS[array.dtype][0] == 0
        ):
            return Packing(*(getattr(struct, name) for name in Packing._fields))
    # bfloat16 is exactly representable in float32: half the bytes for the same values.
    narrow = dtype == "bfloat16" or array.dtype == "bfloat16"
    return Packing(Format.BF16 if narrow else Format.F32)


def input_precision(packing: Packing, dtype: str) -> InputPrecision:
    """Precision of the other operand of a product: exact in float32, else cheaper."""
    if dtype == "bfloat16" and packing.quantized:
        return InputPrecision(int(Flag.X_INT16), int(QUANTIZED[requested_inputs()]))
    narrow = dtype == "bfloat16" and packing.format == Format.BF16
    flag = Flag.X_BF16 if narrow else Flag.X_EXACT
    return InputPrecision(int(flag), int(flag))


def readable(array: HostArray, packing: Packing) -> HostArray:
    """Convert an array, if necessary, to a kind that PACK reads into ``packing``."""
    if packing.quantized or array.dtype in PLAIN:
        return array
    return convert(array, "bfloat16" if packing.format == Format.BF16 else "float32")


def pack_rows(
    sources: Sequence[HostArray], dtype: str, emitter: CommandEmitter
) -> tuple[Matrix, ...]:
    """Stack matrices in one; returns one matrix for each if their packings differ."""
    packings = [packing_of(source, dtype, emitter) for source in sources]
    if len(set(packings)) > 1:
        return tuple(pack_rows([source], dtype, emitter)[0] for source in sources)
    place = stored_place(sources[0], dtype) if len(sources) == 1 else None
    if place is not None and (shared := emitter.shared.get(place)):
        return (shared,)
    rows = sum(source.shape[0] for source in sources)
    inputs = input_precision(packings[0], dtype)
    matrix = Matrix(packings[0], rows, sources[0].shape[1], inputs, emitter)
    first = 0
    for source in sources:
        matrix.fill(source, emitter, first=first)
        first += source.shape[0]
    if place is not None:
        emitter.shared[place] = matrix
    return (matrix,)


def pack_pairs(
    gate: HostArray, up: HostArray, dtype: str, emitter: CommandEmitter
) -> tuple[Matrix, ...]:
    """Interleave gate and up by 16 rows; returns two matrices if packings differ."""
    packings = [packing_of(source, dtype, emitter) for source in (gate, up)]
    if packings[0] != packings[1]:
        return tuple(pack_rows([source], dtype, emitter)[0] for source in (gate, up))
    rows = 2 * LANES * -(-gate.shape[0] // LANES)
    inputs = input_precision(packings[0], dtype)
    matrix = Matrix(packings[0], rows, gate.shape[1], inputs, emitter)
    for first, source in ((0, gate), (LANES, up)):
        matrix.fill(source, emitter, first=first, flags=int(Flag.INTERLEAVE))
    return (matrix,)


StoredPlace = tuple[Hashable, str, str, tuple[int, ...]]


def stored_place(source: HostArray, dtype: str) -> StoredPlace | None:
    """Return a key of an array's memory, so that tied weights are packed once."""
    if source.origin is None:
        return None
    return source.origin, source.dtype, dtype, source.shape


def packable(name: str, shape: tuple[int, ...], dtype: str) -> str | None:
    """``None``, or the reason why a tensor cannot be packed into tiles."""
    if len(shape) != 2 or min(shape) < 1:
        return f"{name} of shape {list(shape)} is not a matrix"
    if dtype not in SIZES and dtype not in KINDS and dtype not in BLOCKS:
        return f"{name} has an unknown dtype, {dtype}"
    return None
