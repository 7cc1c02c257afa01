"""Product with a block-sparse matrix that visits the stored blocks only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl_jax.tensors import Array

LANES = 128

MOST_ROWS = 512


def block_sparse_matmul(
    dense: Array, values: Array, indices: Any, *, columns: int, interpret: Any = False
) -> Array:
    """As :func:`inl.kernels.block_sparse_matmul`.

    dense: [T, K]. values: [B, b, b]. indices: B pairs on the host, row and column of a
    block. Columns of blocks of which none is stored are 0. Blocks are padded to a
    multiple of 128.
    """
    block = values.shape[-1]
    size, count = block + -block % LANES, columns // block
    if size != block:
        more = (0, size - block)
        tiles = dense.reshape(len(dense), -1, block)
        dense = jnp.pad(tiles, ((0, 0), (0, 0), more)).reshape(len(dense), -1)
        values = jnp.pad(values, ((0, 0), more, more))
    visits = jnp.asarray(visits_of(np.asarray(indices), count))
    values = values if len(values) else jnp.zeros((1, size, size), dense.dtype)
    rows = min(dense.shape[0], MOST_ROWS)
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(dense.shape[0], rows), visits.shape[1]),
            in_specs=[
                pl.BlockSpec((rows, size), lambda m, i, v: (m, v[1, i])),
                pl.BlockSpec((1, size, size), lambda _, i, v: (v[0, i], 0, 0)),
            ],
            out_specs=pl.BlockSpec((rows, size), lambda m, i, v: (m, v[2, i])),
            scratch_shapes=[pltpu.VMEM((rows, size), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((len(dense), count * size), dense.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2),
        interpret=interpret,
        name="block_sparse_matmul",
    )(visits, dense, values)
    out = out.reshape(len(out), count, size)[:, :, :block]
    return out.reshape(len(out), columns)


def visits_of(indices: Any, columns: int) -> Any:
    """Return the visits of a row of blocks, by column: int32 [5, V].

    Of each visit the block, its row and column, whether it is the first of the column,
    and whether it is added: a column without blocks is visited once, to be 0.
    """
    pairs = indices.reshape(-1, 2)
    empty = np.setdiff1d(np.arange(columns), pairs[:, 1])
    zeros = np.zeros_like(empty)
    blocks = np.concatenate([np.arange(len(pairs)), zeros])
    rows = np.concatenate([pairs[:, 0], zeros])
    wanted = np.concatenate([pairs[:, 1], empty])
    added = np.concatenate([np.ones(len(pairs), np.int64), zeros])
    order = np.lexsort((rows, wanted))
    wanted = wanted[order]
    first = np.diff(wanted, prepend=-1) != 0
    table = [blocks[order], rows[order], wanted, first, added[order]]
    return np.stack(table).astype(np.int32)


def body(visits: Any, dense: Any, values: Any, out: Any, sums: Any) -> None:
    """Add one block."""
    index = pl.program_id(1)

    @pl.when(visits[3, index] == 1)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(visits[4, index] == 1)
    def _() -> None:
        precision = jax.lax.Precision.HIGHEST if dense.dtype == jnp.float32 else None
        sums[...] += jnp.dot(
            dense[...], values[0], precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    out[...] = sums[...].astype(out.dtype)
