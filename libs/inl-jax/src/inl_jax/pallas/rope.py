"""Rotation of the queries and keys of prompts, in one pass over memory.

XLA computes the halves of a head apart, each in half of a register's lanes, and then
moves the result to the order of heads that attention reads. Here a head is rotated by
its 128 lanes, and stored in that order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.spec.kernel import Kernel
from inl_jax.tensors import Array
from inl_jax.xla.kernel import inlined

LANES = 128

TOKENS = 256
"""Tokens of a block."""


def rope(
    q: Array, k: Array, cos: Array, sin: Array, *, interpret: Any = False
) -> tuple[Array, Array]:
    """The op ``rope`` for heads of 128."""
    wide = jnp.concatenate([cos, cos], 1), jnp.concatenate([-sin, sin], 1)
    run = partial(rotated, tables=wide, interpret=interpret)
    return run(q, name="rope_q"), run(k, name="rope_k")


def rotated(x: Array, tables: tuple[Array, Array], interpret: Any, name: str) -> Array:
    """Rotate ``x`` [T, heads, 128] by cosines and signed sines [T, 128]."""
    tokens, heads, dim = x.shape
    table = pl.BlockSpec((TOKENS, dim), lambda i: (i, 0))
    out = pl.pallas_call(
        body,
        grid=(pl.cdiv(tokens, TOKENS),),
        in_specs=[
            pl.BlockSpec((TOKENS, heads * dim), lambda i: (i, 0)),
            table,
            table,
        ],
        out_specs=pl.BlockSpec((heads, TOKENS, dim), lambda i: (0, i, 0)),
        out_shape=jax.ShapeDtypeStruct((heads, tokens, dim), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name=name,
    )(x.reshape(tokens, -1), *tables)
    # Attention swaps these axes again, which leaves nothing to do.
    return out.swapaxes(0, 1)


def body(x: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotate the heads of a block of tokens."""
    dim = out.shape[-1]

    @pl.loop(0, out.shape[0])
    def _(head: Any) -> None:
        lanes = pl.ds(pl.multiple_of(head * dim, dim), dim)
        part = x[:, lanes].astype(jnp.float32)
        turned = part * cos[...] + pltpu.roll(part, dim // 2, 1) * sin[...]
        out[head] = turned.astype(out.dtype)


def refuse(q: Any, _k: Any, cos: Any, _sin: Any, **_: Any) -> str | None:
    """Refuse other heads than those of 128, and steps of few tokens."""
    if q.shape[2] != LANES or 2 * cos.shape[1] != LANES:
        return f"takes heads of {LANES}, all of which is rotated"
    if q.shape[0] < TOKENS:
        return f"takes {TOKENS} tokens or more"
    return None


def kernel(interpret: Any = False) -> Kernel:
    """Return the kernel; ``interpret`` simulates it on the CPU."""
    run = partial(inlined(rope), interpret=interpret)
    return Kernel("rope", "pallas", run, refuse, preference=10)
