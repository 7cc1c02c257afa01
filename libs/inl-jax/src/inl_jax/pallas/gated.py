"""Gated feed-forward layer of many rows with plain weights.

Gate and up projections are one kernel: both products of a block and their activation,
which is computed beside the products of the next rows. XLA computes the products one
after the other, and the activation within the second one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.spec.kernel import Kernel
from inl_jax.pallas import dense
from inl_jax.pallas.dense import LANES, LEAST_ROWS, VMEM_BYTES
from inl_jax.tensors import Array
from inl_jax.xla import layers
from inl_jax.xla.kernel import inlined

NAME = "gated_matmul"

INPUT_BYTES = 8 << 20
"""Most bytes of a block of rows."""

MATRIX_BYTES = 4 << 20
"""Most bytes of a block of one matrix."""

LEAST_INPUTS = 2048
"""Fewest inputs: products of fewer ones are short beside their activation."""

MOST_INPUTS = 8192
"""More inputs would leave too few outputs of a block."""

PART = 256
"""Rows whose activation is computed beside the products of the next ones."""


class Blocks(NamedTuple):
    """Rows and outputs of a block, which has all inputs."""

    rows: int
    outputs: int


def blocks_of(rows: int, inputs: int, outputs: int) -> Blocks:
    """Return the block sizes of a shape."""
    most = INPUT_BYTES // (2 * inputs) // PART * PART
    wide = MATRIX_BYTES // (2 * inputs) // LANES * LANES
    return Blocks(min(rows + -rows % PART, most), min(outputs, wide))


def gated(
    x: Array, gate: Array, up: Array, *, activation: str, interpret: Any = False
) -> Array:
    """Return ``activation(x gate') * (x up')`` for ``x`` [T, H], matrices [I, H]."""
    tokens, inputs = x.shape
    outputs = gate.shape[0]
    size = blocks_of(tokens, inputs, outputs)
    x = jnp.pad(x, ((0, -tokens % size.rows), (0, 0)))
    matrix = pl.BlockSpec((size.outputs, inputs), lambda _, n: (n, 0))
    out = pl.pallas_call(
        partial(body, activation),
        grid=(len(x) // size.rows, pl.cdiv(outputs, size.outputs)),
        in_specs=[
            pl.BlockSpec((size.rows, inputs), lambda m, _: (m, 0)),
            matrix,
            matrix,
        ],
        out_specs=pl.BlockSpec((size.rows, size.outputs), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 2, vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * len(x) * inputs * outputs,
            bytes_accessed=x.nbytes + 2 * gate.nbytes + 2 * len(x) * outputs,
            transcendentals=len(x) * outputs,
        ),
        interpret=interpret,
        name=NAME,
    )(x, gate, up)
    return out[:tokens]


def body(activation: str, x: Any, gate: Any, up: Any, out: Any) -> None:
    """One block of rows and outputs."""
    for start in range(0, x.shape[0], PART):
        rows = slice(start, min(start + PART, x.shape[0]))
        wide, factor = (product(x[rows, :], each[...]) for each in (gate, up))
        wide, factor = (each.astype(out.dtype) for each in (wide, factor))
        out[rows, :] = layers.gated_activation(wide, factor, activation=activation)


def product(x: Any, weight: Any) -> Any:
    """Multiply by a matrix transposed, in float32."""
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def gated_mlp(
    x: Array, w: GatedMlp, *, activation: str, interpret: Any = False
) -> Array:
    inner = gated(x, w.gate, w.up, activation=activation, interpret=interpret)
    down = Linear(w.down)
    if dense.refuse(inner, down) is None:
        return dense.linear(inner, down, interpret=interpret)
    return layers.linear(inner, down)


def refuse(x: Any, w: Any, **_: Any) -> str | None:
    """Refuse what XLA multiplies as fast or what does not fill registers."""
    outputs, inputs = w.gate.shape
    if x.dtype != "bfloat16":
        return f"takes bfloat16, found {x.dtype}"
    if len(x.shape) != 2 or x.shape[0] < LEAST_ROWS:
        return f"takes {LEAST_ROWS} rows or more"
    if inputs % LANES or outputs % LANES:
        return f"takes multiples of {LANES}, found {inputs} inputs, {outputs} outputs"
    if not LEAST_INPUTS <= inputs <= MOST_INPUTS:
        return f"takes {LEAST_INPUTS} to {MOST_INPUTS} inputs"
    return None


def kernel(interpret: Any = False) -> Kernel:
    """Return the kernel; ``interpret`` simulates it on the CPU."""
    run = partial(inlined(gated_mlp), interpret=interpret)
    return Kernel("gated_mlp", "pallas_dense", run, refuse, preference=5)
