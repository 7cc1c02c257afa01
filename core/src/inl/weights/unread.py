"""Arrays of a checkpoint that are read when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.checkpoints.blocks.dtypes import packed_bytes
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint


class UnreadArray(HostArray):
    """A whole stored tensor. A backend that has it in another form never reads it.

    check: called with the array when it has been read, to raise for invalid numbers.
    """

    __slots__ = ("_check", "_checkpoint", "_name", "_read")
    _checkpoint: Checkpoint
    _name: str
    _check: Callable[[HostArray], None] | None
    _read: NDArray[Any] | None

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        check: Callable[[HostArray], None] | None = None,
    ) -> None:
        dtype, shape = checkpoint.spec(name)
        # Frozen: set as the initializer of a frozen dataclass does.
        for field, value in {
            "dtype": dtype,
            "shape": shape,
            "origin": (checkpoint, name),
            "_checkpoint": checkpoint,
            "_name": name,
            "_check": check,
            "_read": None,
        }.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> NDArray[Any]:
        """The stored elements; raises :class:`~inl.errors.CheckpointError`."""
        data = self._read
        if data is None:
            whole = self._checkpoint.tensor(self._name)
            assert (whole.dtype, whole.shape) == (self.dtype, self.shape)
            if self._check:
                self._check(whole)
            data = whole.data
            object.__setattr__(self, "_read", data)
        return data

    def rows(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Read entries of the first axis only, without checking them."""
        read = self._reader()
        if read is None:
            return super().rows(indices)
        data = np.empty((len(indices), self._row_bytes()), np.uint8)
        for row, index in zip(data, indices, strict=True):
            read(int(index), row.data)
        return data

    def pieces(self, rows: int) -> Iterator[HostArray]:
        """Read each piece into the same memory, if the rows can be read."""
        read = self._reader()
        if read is None:
            yield self
            return
        memory = np.empty((min(rows, self.shape[0]), self._row_bytes()), np.uint8)
        for start in range(0, self.shape[0], rows):
            data = memory[: self.shape[0] - start]
            read(start, data.reshape(-1).data)
            piece = HostArray(data, self.dtype, (len(data), *self.shape[1:]))
            if self._check:
                try:
                    self._check(piece)
                except CheckpointError:
                    _ = self.data  # raises with the index in the whole tensor
                    raise
            yield piece

    def _reader(self) -> Callable[[int, memoryview], None] | None:
        if self._read is not None:
            return None
        return self._checkpoint.row_reader(self._name)

    def _row_bytes(self) -> int:
        return packed_bytes(self.shape[1:], self.dtype)


class DividedArray(HostArray):
    """A plain tensor that ranks divide, of which each part is read when it is used.

    axis: that which the ranks divide. read: returns the part of a rank, called once for
    each part that is used.
    """

    __slots__ = ("_axis", "_parts", "_read_part", "_size")
    _axis: int
    _parts: dict[int, NDArray[Any]]
    _read_part: Callable[[int], HostArray]
    _size: int

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        axis: int,
        ranks: int,
        read: Callable[[int], HostArray],
    ) -> None:
        values: dict[str, Any] = {
            "dtype": dtype,
            "shape": shape,
            "origin": None,
            "_axis": axis,
            "_parts": {},
            "_read_part": read,
            "_size": shape[axis] // ranks,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> NDArray[Any]:
        """All parts."""
        return self.part((slice(None),) * len(self.shape))

    def part(self, index: tuple[slice, ...]) -> NDArray[Any]:
        """Read the parts of the ranks whose elements are chosen."""
        start, stop, _ = index[self._axis].indices(self.shape[self._axis])
        ranks = range(start // self._size, -(-stop // self._size))
        parts = [self._of(rank) for rank in ranks]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, self._axis)
        first = ranks.start * self._size
        own = slice(start - first, stop - first)
        return whole[(*index[: self._axis], own, *index[self._axis + 1 :])]

    def _of(self, rank: int) -> NDArray[Any]:
        if rank not in self._parts:
            read = self._read_part(rank)
            assert read.dtype == self.dtype, "converted by the function"
            self._parts[rank] = read.data.reshape(read.shape)
        return self._parts[rank]
