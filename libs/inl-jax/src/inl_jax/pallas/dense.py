"""Product of many rows with a plain matrix, with searched block sizes.

XLA computes a gated activation again for each block of outputs of the product that
follows it; before this kernel it is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.ops.linear import Linear
from inl.spec.kernel import Kernel
from inl_jax.pallas import block_sizes
from inl_jax.tensors import Array
from inl_jax.xla.kernel import inlined

NAME = "dense_matmul"

LANES = 128

LEAST_ROWS = 1024
"""Fewest rows for which the kernel is used."""

LEAST_INPUTS = 8192
"""Fewest inputs: XLA multiplies smaller matrices as fast, and next to their
neighbors."""

VMEM_BYTES = 56 << 20


class Blocks(NamedTuple):
    """Rows, outputs and inputs of a block."""

    rows: int
    outputs: int
    inputs: int


def blocks_of(
    rows: int, inputs: int, outputs: int, sizes: Mapping[str, int] | None = None
) -> Blocks:
    """Return the block sizes of a shape.

    sizes: of which the block sizes are at most, in place of those of the rule.
    """
    sizes = sizes or {}
    unit = sizes.get("inputs", 2048) // LANES
    parts = inputs // LANES
    # Blocks of inputs are whole: a part beyond the matrix would be added.
    while parts % unit:
        unit -= 1
    return Blocks(
        min(rows + -rows % LANES, sizes.get("rows", 1024)),
        min(outputs, sizes.get("outputs", 1024)),
        unit * LANES,
    )


def shape_of(inputs: int, outputs: int, dtype: Any) -> str:
    """Name a shape in the table of block sizes."""
    return f"many rows, {inputs} to {outputs}, {jnp.dtype(dtype)}"


def linear(
    x: Array, w: Linear, *, sizes: block_sizes.Sizes = (), interpret: Any = False
) -> Array:
    """The op ``linear`` without a bias: ``x`` [T, K], weight [N, K]; returns [T, N]."""
    tokens, inputs = x.shape
    outputs = w.weight.shape[0]
    chosen = block_sizes.chosen(sizes, NAME, shape_of(inputs, outputs, x.dtype))
    size = blocks_of(tokens, inputs, outputs, chosen)
    x = jnp.pad(x, ((0, -tokens % size.rows), (0, 0)))
    parts = inputs // size.inputs
    out = pl.pallas_call(
        partial(body, parts),
        grid=(pl.cdiv(outputs, size.outputs), len(x) // size.rows, parts),
        in_specs=[
            pl.BlockSpec((size.rows, size.inputs), lambda _, m, k: (m, k)),
            pl.BlockSpec((size.outputs, size.inputs), lambda n, _, k: (n, k)),
        ],
        out_specs=pl.BlockSpec((size.rows, size.outputs), lambda n, m, _: (m, n)),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), x.dtype),
        scratch_shapes=[pltpu.VMEM((size.rows, size.outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * inputs * outputs,
            bytes_accessed=x.nbytes + w.weight.nbytes + 2 * len(x) * outputs,
            transcendentals=0,
        ),
        interpret=interpret,
        name=NAME,
    )(x, w.weight)
    return out[:tokens]


def body(parts: int, x: Any, weight: Any, out: Any, sums: Any) -> None:
    """Add one block of inputs to a block of sums."""
    part = pl.program_id(2)

    @pl.when(part == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    sums[...] += jax.lax.dot_general(
        x[...], weight[...], (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip

    @pl.when(part == parts - 1)
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)


def refuse(x: Any, w: Any, **_: Any) -> str | None:
    """Refuse what XLA multiplies as fast or what does not fill registers."""
    outputs, inputs = w.weight.shape
    if x.dtype != "bfloat16" or w.bias is not None:
        return "takes bfloat16 without a bias"
    if len(x.shape) != 2 or x.shape[0] < LEAST_ROWS:
        return f"takes {LEAST_ROWS} rows or more"
    if inputs % LANES or outputs % LANES:
        return f"takes multiples of {LANES}, found {inputs} inputs, {outputs} outputs"
    if inputs < max(LEAST_INPUTS, 2 * outputs):
        return f"takes {LEAST_INPUTS} inputs or more, and twice the outputs"
    return None


def kernel(interpret: Any = False) -> Kernel:
    """Return the kernel; ``interpret`` simulates it on the CPU."""
    run = partial(inlined(linear), interpret=interpret)
    return Kernel("linear", "pallas_dense", run, refuse, preference=5)
