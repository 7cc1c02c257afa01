"""Experts divided over the devices of a mesh's expert axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inl.backend.traced.moe import combine_experts
from inl.ops.moe import Experts
from inl.placement.mesh import EXPERT
from inl.spec.kernel import Kernel
from inl_jax.tensors import Array
from inl_jax.xla import functions
from inl_jax.xla.kernel import kernel
from inl_jax.xla.layers import gated_activation
from inl_jax.xla.moe import expert_product


def experts(
    x: Array, ids: Array, weights: Array, w: Experts, *, activation: str
) -> Array:
    """The op ``experts``: each device computes its experts for all tokens."""
    count, (tokens, slots) = w.gate.shape[0], ids.shape
    local = ids - jax.lax.axis_index(EXPERT) * count
    mine = (local >= 0) & (local < count)
    # Slots of other devices compute some expert, and are left out of the sum.
    chosen = jnp.where(mine, local, 0).reshape(-1)
    rows = jnp.repeat(x, slots, axis=0)

    def product(rows: Array, weight: Array) -> Array:
        turned = jnp.swapaxes(weight, 1, 2)
        return expert_product(rows, chosen, turned).astype(x.dtype)

    gate, up = product(rows, w.gate), product(rows, w.up)
    inner = gated_activation(gate, up, activation=activation)
    y = product(inner, w.down).reshape(tokens, slots, -1)
    y = jnp.where(mine[:, :, None], y, 0)
    return jax.lax.psum(combine_experts(functions, y, weights), EXPERT)


KERNELS: tuple[Kernel, ...] = (kernel(experts),)
