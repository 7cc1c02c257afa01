"""Products with block-sparse matrices."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.spec.block_structure import structure_of
from inl.spec.explained import report
from inl_toolkit.functional.arrays import dtype_name, like, module_of
from inl_toolkit.functional.dynamics import framework_of, functions_of
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.kernels.operands import check_arrays, check_size
from inl_toolkit.kernels.profile import recorded

if TYPE_CHECKING:
    from numpy.typing import NDArray


@translating
def block_sparse_matmul(
    dense: Any, sparse_values: Any, indices: Any, *, columns: int
) -> Any:
    """Product of ``dense`` [..., K] and a block-sparse matrix [K, columns].

    sparse_values: [B, b, b], the blocks that are not zero. indices: B pairs of integers
    that NumPy reads, the row and column of each block in units of b. Time and memory
    follow B. Returns [..., columns]. Raises :class:`~inl.errors.KernelError` for shapes
    that do not match, an index outside the matrix, and a block that is given twice.
    """
    check_arrays("block_sparse_matmul", dense=dense, sparse_values=sparse_values)
    check_size("block_sparse_matmul", "columns", columns)
    shape = tuple(sparse_values.shape)
    structure = structure_of(indices, shape, dense.shape[-1], columns)
    where = structure.where

    def run() -> Any:
        precision = f"{dtype_name(dense)} operands"
        if isinstance(dense, np.ndarray):
            report("block_sparse/numpy, products of gathered blocks", precision)
            y = _on_numpy(dense, sparse_values, where, columns)
            return y.reshape(*dense.shape[:-1], columns)
        own = functions_of(framework_of("block_sparse_matmul", "dense", dense))
        if own.block_sparse is not None:
            y = own.block_sparse(dense, sparse_values, structure)
            if y is not None:
                return y
        name = framework_of("block_sparse_matmul", "dense", dense)
        report(f"block_sparse/{name}, products of gathered blocks", precision)
        y = _on_arrays(dense, sparse_values, where, columns)
        return y.reshape(*dense.shape[:-1], columns)

    return recorded("block_sparse_matmul", dense, run)


def _on_arrays(dense: Any, values: Any, where: NDArray[Any], columns: int) -> Any:
    """Return [rows, columns], differentiable where the framework is."""
    xp, size = module_of("block_sparse_matmul", "dense", dense), values.shape[-1]
    tiles = xp.reshape(dense, (-1, dense.shape[-1] // size, size))
    order = np.argsort(where[:, 1], kind="stable")
    ends = np.searchsorted(where[order, 1], np.arange(columns // size + 1))
    # One copy of each to the device: a copy for each column would wait for it.
    rows, held = like(where[order, 0], dense), like(order, dense)
    sorted_values, parts = xp.take(values, held, axis=0), []
    for start, end in pairwise(ends.tolist()):
        if start == end:
            parts.append(tiles[:, 0] * 0)
            continue
        # Whole tiles: gathering single columns would take as long as the product.
        x = xp.reshape(
            xp.take(tiles, rows[start:end], axis=1), (-1, (end - start) * size)
        )
        w = xp.reshape(sorted_values[start:end], (-1, size))
        parts.append(xp.matmul(x, w))
    return xp.concatenate(parts, axis=1)


def _on_numpy(
    dense: NDArray[Any], values: NDArray[Any], where: NDArray[Any], columns: int
) -> NDArray[Any]:
    """Return [rows, columns]; one buffer holds the operands of all products.

    New memory for each would take longer than the copies into it.
    """
    size = values.shape[-1]
    tiles = dense.reshape(-1, dense.shape[-1] // size, size)
    rows, most = len(tiles), int(np.bincount(where[:, 1], minlength=1).max())
    y = np.zeros((rows, columns), np.result_type(dense, values))
    buffers = np.empty(most * rows * size, dense.dtype), np.empty_like(values[:most])
    for column in np.unique(where[:, 1]):
        blocks = np.flatnonzero(where[:, 1] == column)
        wide = len(blocks) * size
        x = buffers[0][: rows * wide].reshape(rows, -1, size)
        w = buffers[1][: len(blocks)]
        # Indices are checked; in mode "raise" NumPy would copy through another buffer.
        np.take(tiles, where[blocks, 0], axis=1, out=x, mode="clip")
        np.take(values, blocks, axis=0, out=w, mode="clip")
        part = y[:, column * size : (column + 1) * size]
        np.matmul(x.reshape(rows, wide), w.reshape(wide, size), out=part)
    return y
