"""Places of the blocks of block-sparse matrices, checked and sorted once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from inl.errors import KernelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

KEPT = 256
"""Most structures that are kept."""


class BlockLists(NamedTuple):
    """The blocks of each column of blocks, or of each row; all int32."""

    order: NDArray[Any]
    """[columns]: those with the most blocks first."""
    starts: NDArray[Any]
    """[columns + 1]: range of each column in the lists below."""
    blocks: NDArray[Any]
    """[B]: numbers of blocks."""
    others: NDArray[Any]
    """[B]: the row of each, or, of rows, its column."""


class BlockStructure:
    """Places of the blocks that are not zero.

    where: [B, 2], row and column of each block in units of ``size``. rows, columns: of
    blocks.
    """

    def __init__(self, where: NDArray[Any], size: int, rows: int, columns: int) -> None:
        self.where, self.size, self.rows, self.columns = where, size, rows, columns
        self._copies: dict[Any, Any] = {}

    def by_column(self) -> BlockLists:
        """List the blocks of each column."""
        return self._lists(1, self.columns)

    def by_row(self) -> BlockLists:
        """List the blocks of each row: the columns of the transposed matrix."""
        return self._lists(0, self.rows)

    def copy(self, key: Any, make: Callable[[], T]) -> T:
        """Return what ``make`` returned at the first call with ``key``."""
        if key not in self._copies:
            self._copies[key] = make()
        found: T = self._copies[key]
        return found

    def _lists(self, axis: int, count: int) -> BlockLists:
        of = self.where[:, axis]
        blocks = np.lexsort((self.where[:, 1 - axis], of))
        numbers = np.bincount(of, minlength=count)
        return BlockLists(
            np.argsort(-numbers, kind="stable").astype(np.int32),
            np.concatenate([[0], np.cumsum(numbers)]).astype(np.int32),
            blocks.astype(np.int32),
            self.where[blocks, 1 - axis].astype(np.int32),
        )


def structure_of(
    indices: Any, values: tuple[int, ...], inner: int, columns: int
) -> BlockStructure:
    """Return the structure of a matrix [inner, columns], the same for equal indices.

    values: shape of the blocks. Raises :class:`~inl.errors.KernelError` as
    :func:`inl.kernels.block_sparse_matmul`.
    """
    where = np.asarray(indices)
    fits = where.ndim == 2 and where.shape[1] == 2 and where.dtype.kind in "iu"
    if not fits or len(values) != 3 or values != (len(where), values[2], values[2]):
        raise KernelError(
            f"block_sparse_matmul: found values {list(values)} and indices "
            f"{list(where.shape)} of {where.dtype}, accepted: [B, b, b] and integers "
            "[B, 2]"
        )
    return _structure(where.tobytes(), where.dtype.str, values[2], inner, columns)


@lru_cache(KEPT)
def _structure(
    data: bytes, dtype: str, size: int, inner: int, columns: int
) -> BlockStructure:
    where = np.frombuffer(data, dtype).reshape(-1, 2).astype(np.int64)
    if size == 0 or inner % size or columns % size or not columns:
        raise KernelError(
            f"block_sparse_matmul: found a matrix of {inner} x {columns}, accepted: "
            f"multiples of the block size, {size}"
        )
    limits = inner // size, columns // size
    outside = ((where < 0) | (where >= limits)).any()
    if outside or len(np.unique(where, axis=0)) != len(where):
        raise KernelError(
            f"block_sparse_matmul: indices: accepted: different pairs below "
            f"{list(limits)}"
        )
    return BlockStructure(where, size, *limits)
