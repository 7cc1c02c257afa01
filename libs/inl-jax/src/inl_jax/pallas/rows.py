"""Functions of rows in one pass over memory: sums with a norm, and INL dynamics.

XLA fuses these functions too, and with their neighbors; the kernels have a preference
below it and are for measurements (``inl tune``) and for gradients, of which they keep
nothing but the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_jax.functional import Pair, coefficients, dynamics
from inl_jax.tensors import Array, upcast
from inl_jax.xla.kernel import inlined
from inl_jax.xla.layers import rms_norm

BLOCK_BYTES = 8 << 20
"""Bytes of all operands of a block, in float32."""

SUBLANES = 16
"""The rows of a block are a multiple of this."""

LANES = 128


def over_rows(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    results: Sequence[Any],
    name: str,
    interpret: Any,
) -> Any:
    """Compute ``function`` of blocks of rows.

    arrays: [T, columns], or [1, columns] for all rows. results: specs of [T, columns].
    """
    total = results[0].shape[0]
    width = sum(each.shape[1] for each in (*arrays, *results))
    rows = max(SUBLANES, BLOCK_BYTES // (4 * width) // SUBLANES * SUBLANES)
    rows = min(rows, total + -total % SUBLANES) if total >= SUBLANES else total

    def block(array: Any) -> pl.BlockSpec:
        shared = array.shape[0] == 1 and total > 1
        size = (1 if shared else rows, array.shape[1])
        return pl.BlockSpec(size, lambda i: (0 if shared else i, 0))

    def body(*refs: Any) -> None:
        step = SUBLANES if rows % SUBLANES == 0 else rows

        @pl.loop(0, rows // step)
        def _(index: Any) -> None:
            part = pl.ds(pl.multiple_of(index * step, step), step)
            parts = [slice(None) if ref.shape[0] < rows else part for ref in refs]
            given, wanted = parts[: len(arrays)], parts[len(arrays) :]
            sources, places = refs[: len(arrays)], refs[len(arrays) :]
            operands = (ref[at, :] for ref, at in zip(sources, given, strict=True))
            computed = function(*operands)
            for ref, at, value in zip(places, wanted, computed, strict=True):
                ref[at, :] = value.astype(ref.dtype)

    return pl.pallas_call(
        body,
        grid=(pl.cdiv(total, rows),),
        in_specs=[block(array) for array in arrays],
        out_specs=[block(result) for result in results],
        out_shape=list(results),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=4 * BLOCK_BYTES
        ),
        interpret=interpret,
        name=name,
    )(*arrays)


def reduce_add_norm(
    residual: Array, delta: Array, w: Norm, *, eps: float, interpret: Any = False
) -> tuple[Array, Array]:
    def function(residual: Array, delta: Array, weight: Array) -> tuple[Array, Array]:
        # The sum is rounded to the dtype in which the next layers read it.
        total = (upcast(residual) + upcast(delta)).astype(residual.dtype)
        return total, rms_norm(total, Norm(weight), eps=eps)

    specs = [jax.ShapeDtypeStruct(residual.shape, residual.dtype)] * 2
    arrays = (residual, delta, w.weight[None])
    total, y = over_rows(function, arrays, specs, "reduce_add_norm", interpret)
    return total, y


def inl_dynamics_n_steps(
    x: Array,
    v: Array,
    mu: Array,
    controller: Array,
    *,
    n_steps: int,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
    interpret: Any = False,
) -> Pair:
    """As the op, with a derivative that is one pass too."""

    def steps(x: Array, v: Array, mu: Array, controller: Array) -> Pair:
        coefs = coefficients(controller, most_beta)
        operands = (x, v, mu, *coefs, jnp.float32(dt))
        return dynamics(operands, n_steps, limit)

    def rows(array: Array, width: int) -> Array:
        return jnp.broadcast_to(array, (*x.shape[:-1], width)).reshape(-1, width)

    width = x.shape[-1]
    arrays = (*(rows(each, width) for each in (x, v, mu)), rows(controller, 3 * width))
    position, velocity = differentiable(steps, interpret)(*arrays)
    return position.reshape(x.shape), velocity.reshape(x.shape)


def differentiable(steps: Callable[..., Pair], interpret: Any) -> Callable[..., Pair]:
    """Return ``steps`` as a kernel, with a kernel for its derivative."""

    def specs(arrays: Sequence[Array]) -> list[Any]:
        return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]

    @jax.custom_vjp
    def run(*arrays: Array) -> Any:
        name = "inl_dynamics"
        return tuple(over_rows(steps, arrays, specs(arrays[:2]), name, interpret))

    def forward(*arrays: Array) -> Any:
        return run(*arrays), arrays

    def backward(arrays: Any, gradients: Any) -> Any:
        def function(*values: Array) -> Any:
            wide = [upcast(value) for value in values]
            _, pull = jax.vjp(steps, *wide[: len(arrays)])
            return pull(tuple(wide[len(arrays) :]))

        name = "inl_dynamics_backward"
        operands = (*arrays, *gradients)
        return tuple(over_rows(function, operands, specs(arrays), name, interpret))

    run.defvjp(forward, backward)
    return run


def refuse(x: Any, *_: Any, **__: Any) -> str | None:
    """Refuse what does not fill vector registers."""
    if x.dtype not in ("bfloat16", "float32"):
        return f"takes bfloat16 and float32, found {x.dtype}"
    if x.shape[-1] % LANES:
        return f"last axis {x.shape[-1]} is not a multiple of {LANES}"
    return None


def kernels(interpret: Any = False) -> Iterable[Kernel]:
    """Return the kernels; ``interpret`` simulates them on the CPU."""
    for run in (reduce_add_norm, inl_dynamics_n_steps):
        kernel = partial(inlined(run), interpret=interpret)
        yield Kernel(run.__name__, "pallas", kernel, refuse, preference=-10)
