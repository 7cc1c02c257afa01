"""INL dynamics and per-slot state."""

from __future__ import annotations

import jax.numpy as jnp

from inl.spec.step import Step
from inl_jax.functional import inl_dynamics, inl_dynamics_n_steps, inl_dynamics_step
from inl_jax.tensors import Array
from inl_jax.xla.kernel import kernel


def read_slots(table: Array, step: Step) -> Array:
    index = jnp.arange(step.tokens.shape[0])
    continues = (index < step.used_counts[2]) & (step.rows < step.used_counts[0])
    continues = continues.reshape(-1, *(1,) * (table.ndim - 1))
    return jnp.where(continues, table[step.slots[step.rows]], 0)


def write_slots(x: Array, table: Array, step: Step) -> Array:
    used = jnp.arange(step.slots.shape[0]) < step.used_counts[1]
    used = used.reshape(-1, *(1,) * (table.ndim - 1))
    last = jnp.clip(step.starts[1:] - 1, 0, x.shape[0] - 1)
    return table.at[step.slots].set(jnp.where(used, x[last], 0))


KERNELS = (
    kernel(inl_dynamics),
    kernel(inl_dynamics_step),
    kernel(inl_dynamics_n_steps),
    kernel(read_slots),
    kernel(write_slots),
)
