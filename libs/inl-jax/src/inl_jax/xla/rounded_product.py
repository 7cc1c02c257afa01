"""Products of rounded operands on matrix units, with sums in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inl.spec.explained import refuse, report
from inl_jax.tensors import Array


def product(a: Array, b: Array, inputs: str) -> Array | None:
    """Return ``a`` [..., M, K] @ ``b`` [K, N] or [..., K, N], in the dtype of ``a``.

    inputs: dtype that operands are rounded to. ``None`` where plain products of rounded
    operands are as good: of float64 and float8, and on a CPU, whose products of half
    types XLA computes in float32.
    """
    halves = jnp.bfloat16, jnp.float16
    if jax.default_backend() == "cpu" or inputs not in ("bfloat16", "float16"):
        why = f"{jax.default_backend()} computes {inputs} in float32"
        refuse(f"gemm/xla {inputs}", why)
        return None
    if any(each.dtype not in (*halves, jnp.float32) for each in (a, b)):
        refuse(f"gemm/xla {inputs}", f"found {a.dtype} and {b.dtype}")
        return None
    report(f"gemm/xla {inputs}", f"{inputs} operands; sums in float32")
    x, y = (each.astype(inputs) for each in (a, b))
    return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(a.dtype)
