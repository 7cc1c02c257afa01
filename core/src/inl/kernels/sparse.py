"""Products with block-sparse matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from inl.errors import KernelError
from inl.functional.arrays import like, module_of
from inl.kernels.profile import recorded


def block_sparse_matmul(
    dense: Any, sparse_values: Any, indices: Any, *, columns: int
) -> Any:
    """Product of ``dense`` [..., K] and a block-sparse matrix [K, columns].

    sparse_values: [B, b, b], the blocks that are not zero. indices: B pairs of integers
    that NumPy reads, the row and column of each block in units of b. Time and memory
    follow B. Returns [..., columns]. Raises :class:`~inl.errors.KernelError` for shapes
    that do not match, an index outside the matrix, and a block that is given twice.
    """
    where = np.asarray(indices)
    size, inner = sparse_values.shape[-1], dense.shape[-1]
    _check(where, tuple(sparse_values.shape), inner, columns)

    def run() -> Any:
        xp = module_of("block_sparse_matmul", "dense", dense)
        tiles = xp.reshape(dense, (-1, inner // size, size))
        parts = []
        for column in range(columns // size):
            blocks = np.flatnonzero(where[:, 1] == column)
            if not len(blocks):
                parts.append(tiles[:, 0] * 0)
                continue
            # Whole tiles: gathering single columns would take as long as the product.
            x = xp.take(tiles, like(where[blocks, 0], dense), axis=1)
            values = xp.take(sparse_values, like(blocks, dense), axis=0)
            wide = len(blocks) * size
            x, w = xp.reshape(x, (-1, wide)), xp.reshape(values, (wide, size))
            parts.append(xp.matmul(x, w))
        y = xp.concatenate(parts, axis=1)
        return xp.reshape(y, (*dense.shape[:-1], columns))

    return recorded("block_sparse_matmul", dense, run)


def _check(where: Any, values: tuple[int, ...], inner: int, columns: int) -> None:
    fits = where.ndim == 2 and where.shape[1] == 2 and where.dtype.kind in "iu"
    if not fits or len(values) != 3 or values != (len(where), values[2], values[2]):
        raise KernelError(
            f"block_sparse_matmul: found values {list(values)} and indices "
            f"{list(where.shape)} of {where.dtype}, accepted: [B, b, b] and integers "
            "[B, 2]"
        )
    size = values[2]
    if size == 0 or inner % size or columns % size or not columns:
        raise KernelError(
            f"block_sparse_matmul: found a matrix of {inner} x {columns}, accepted: "
            f"multiples of the block size, {size}"
        )
    limits = inner // size, columns // size
    if ((where < 0) | (where >= limits)).any() or len(np.unique(where, axis=0)) != len(
        where
    ):
        raise KernelError(
            f"block_sparse_matmul: indices: accepted: different pairs below "
            f"{list(limits)}"
        )
