"""Products of rows with the matrices of their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inl.ops.moe import ExpertLinear
from inl_jax.tensors import Array, accumulated, einsum


def expert_product(x: Array, ids: Array, weight: Array) -> Array:
    """Multiply row s of ``x`` [S, K] by ``weight[ids[s]]`` [K, N].

    Returns [S, N], of float32 or wider.

    As many copies of a matrix as there are rows, if these are fewer than the experts;
    otherwise one grouped product of the rows in order of their experts.
    """
    if ids.shape[0] <= weight.shape[0]:
        return einsum("sk,skn->sn", x, weight[ids])
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(ids, length=weight.shape[0]).astype(jnp.int32)
    y = jax.lax.ragged_dot(
        x[order],
        weight,
        sizes,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulated(x, weight),
    )
    return jnp.zeros_like(y).at[order].set(y, unique_indices=True)


def dense_expert_linear(x: Array, ids: Array, w: ExpertLinear) -> Array:
    """The op ``expert_linear`` by a loop over all experts.

    Computes every expert for every row, so that ``vmap`` and ``grad`` of it work in any
    order: the grouped product of this JAX cannot be batched.
    """
    rows = jnp.broadcast_to(x, (*ids.shape, x.shape[-1]))

    def add(total: Array, expert: tuple[Array, Array]) -> tuple[Array, None]:
        index, weight = expert
        y = einsum("tsk,nk->tsn", rows, weight)
        return total + jnp.where((ids == index)[:, :, None], y, 0), None

    zeros = jnp.zeros((*ids.shape, w.weight.shape[1]), accumulated(x, w.weight))
    index = jnp.arange(w.weight.shape[0])
    total, _ = jax.lax.scan(add, zeros, (index, w.weight))
    return total.astype(x.dtype)
