"""Verification of drafted tokens."""

from __future__ import annotations

import jax.numpy as jnp

from inl.spec.step import NO_TOKEN, Step, Tables
from inl_jax.tensors import Array
from inl_jax.xla.kernel import kernel


def expand_rows(step: Step, tables: Tables) -> tuple[Step, Tables]:
    index = jnp.arange(step.tokens.shape[0], dtype=jnp.int32)
    used = index < step.used_counts[2]
    slots = jnp.where(used, step.slots[step.rows], 0)
    counts = tables.token_counts[slots]
    if counts.shape[1]:
        before = (step.rows[:, None] == step.rows) & (index[:, None] > index)
        before &= used[:, None] & used
        added = 2 * before.astype(jnp.int32)
        counts = counts.at[index[:, None], step.tokens[None]].add(added)
    expanded = step._replace(
        starts=jnp.arange(len(index) + 1, dtype=jnp.int32),
        slots=index,
        samples=index,
        used_counts=jnp.full(3, step.used_counts[2]),
    )
    zeros = jnp.zeros_like(index)
    return expanded, Tables(
        blocks=jnp.zeros((1, len(index), tables.blocks.shape[2]), jnp.int32),
        lengths=zeros,
        last=zeros,
        adapters=zeros,
        params=tables.params[slots],
        token_counts=counts,
        bias=tables.bias[slots],
    )


def verify(
    tokens: Array, step: Step, tables: Tables, *, width: int
) -> tuple[Array, Tables]:
    counts = step.starts[1:] - step.starts[:-1]
    offsets = jnp.arange(width)
    inside = offsets < counts[:, None]
    at = jnp.where(inside, step.starts[:-1, None] + offsets, 0)
    sampled = jnp.where(inside, tokens[at], NO_TOKEN)
    inputs = step.tokens[at]
    agrees = inside[:, 1:] & (sampled[:, :-1] == inputs[:, 1:])
    agrees = jnp.pad(agrees, ((0, 0), (1, 0)), constant_values=True)
    accepted = inside & (jnp.cumprod(agrees, axis=1) > 0)
    number = accepted.sum(1, dtype=jnp.int32)
    ends = jnp.maximum(number - 1, 0)[:, None]
    last = jnp.maximum(jnp.take_along_axis(sampled, ends, axis=1)[:, 0], 0)
    lengths = tables.lengths.at[step.slots].set(step.lengths - (counts - number))
    seen = tables.token_counts
    if seen.shape[1]:
        seen = seen.at[step.slots[:, None], inputs].add(2 * accepted.astype(jnp.int32))
    tables = tables._replace(
        lengths=lengths, last=tables.last.at[step.slots].set(last), token_counts=seen
    )
    return jnp.where(accepted, sampled, NO_TOKEN).reshape(-1), tables


KERNELS = (kernel(expand_rows), kernel(verify))
