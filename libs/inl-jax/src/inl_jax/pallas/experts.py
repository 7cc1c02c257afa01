"""Product of rows with the matrices of their experts: reads those of chosen ones only.

Rows are gathered in order of their experts, each group padded to tiles. The grid runs
over blocks of outputs and tiles; tiles of one expert follow each other, and share the
block of its matrix that is in VMEM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.ops.moe import ExpertLinear
from inl.spec.kernel import Kernel
from inl_jax.pallas import block_sizes
from inl_jax.pallas.block_sizes import Sizes, static
from inl_jax.tensors import Array
from inl_jax.xla.kernel import inlined

NAME = "expert_linear"

LANES = 128

MATRIX_BYTES = 4 << 20
"""Bytes of a block of a matrix, at most."""

VMEM_BYTES = 48 << 20


class Tiles(NamedTuple):
    """Rows grouped by expert. ``N`` tiles of ``R`` rows."""

    experts: Array
    """[N]; an unused tile has that of the last used one, which is then not read."""
    used: Array
    """[1] number of used tiles."""
    rows: Array
    """[N * R] row of each place; any row for padding."""
    places: Array
    """[S] place of each row."""


def grouped(ids: Array, experts: int, size: int) -> Tiles:
    """Group rows with experts ``ids`` [S] to tiles of ``size`` rows."""
    total = ids.shape[0]
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    counts = jnp.bincount(ids, length=experts).astype(jnp.int32)
    tiles = -(-counts // size)
    ends = jnp.cumsum(tiles)
    most = total // size + min(total, experts)
    index = jnp.minimum(jnp.arange(most), ends[-1] - 1)
    first = jnp.cumsum(counts) - counts
    sorted_ids = ids[order]
    within = jnp.arange(total, dtype=jnp.int32) - first[sorted_ids]
    place = (ends - tiles)[sorted_ids] * size + within
    return Tiles(
        experts=jnp.searchsorted(ends, index, side="right").astype(jnp.int32),
        used=ends[-1:],
        rows=jnp.zeros(most * size, jnp.int32).at[place].set(order),
        places=jnp.zeros(total, jnp.int32).at[order].set(place),
    )


def expert_linear(
    x: Array,
    ids: Array,
    w: ExpertLinear,
    *,
    sizes: Sizes = (),
    interpret: Any = False,
) -> Array:
    """The op ``expert_linear``.

    sizes: bytes of a block of a matrix, in place of those of the table.
    """
    tokens, k = ids.shape
    experts, outputs, inputs = w.weight.shape
    rows = jnp.broadcast_to(x, (tokens, k, inputs)).reshape(tokens * k, inputs)
    size = 128 if tokens * k > 16 * experts else 16
    tiles = grouped(ids.reshape(-1), experts, size)
    block = block_outputs(inputs, outputs, x.dtype, sizes)
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(outputs, block), len(tiles.experts)),
            in_specs=[
                pl.BlockSpec((size, inputs), lambda _, i, *__: (i, 0)),
                pl.BlockSpec((1, block, inputs), lambda n, i, e, _: (e[i], n, 0)),
            ],
            out_specs=pl.BlockSpec((size, block), lambda n, i, *_: (i, n)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(tiles.rows), outputs), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 2, vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name=NAME,
    )(tiles.experts, tiles.used, rows[tiles.rows], w.weight)
    return out[tiles.places].reshape(tokens, k, outputs)


def block_outputs(inputs: int, outputs: int, dtype: Any, sizes: Sizes = ()) -> int:
    """Return the outputs of a block of a matrix [outputs, inputs]."""
    dtype = jnp.dtype(dtype)
    shape = f"{inputs} to {outputs}, {dtype}"
    size = block_sizes.chosen(sizes, NAME, shape).get("bytes", MATRIX_BYTES)
    block = size // (inputs * dtype.itemsize) // LANES * LANES
    return min(max(block, LANES), outputs)


def body(_experts: Any, used: Any, x: Any, weight: Any, out: Any) -> None:
    """Multiply one tile by one block of its expert's matrix."""

    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        y = jax.lax.dot_general(
            x[...], weight[0], (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
        out[...] = y.astype(out.dtype)


def refuse(x: Any, _ids: Any, w: Any, **_: Any) -> str | None:
    """Refuse what does not fill vector registers, or does not fit in VMEM."""
    inputs = w.weight.shape[2]
    if x.dtype not in ("bfloat16", "float32"):
        return f"takes bfloat16 and float32, found {x.dtype}"
    if inputs % LANES or inputs * LANES * 4 > 2 * MATRIX_BYTES:
        most = 2 * MATRIX_BYTES // LANES // 4
        return f"{inputs} inputs are not a multiple of {LANES} up to {most}"
    return None


def kernels(
    interpret: Any = False, config: Mapping[str, int] | None = None
) -> Iterable[Kernel]:
    """Return the kernels; ``interpret`` simulates them on the CPU.

    config: block sizes, see :func:`expert_linear`.
    """
    sizes = static(config or {})
    run = partial(inlined(expert_linear), sizes=sizes, interpret=interpret)
    yield Kernel(
        "expert_linear", "pallas", run, refuse, preference=10, config=dict(sizes)
    )
