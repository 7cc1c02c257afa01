"""Scan of Mamba-2: products of chunks of tokens, of all rows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inl.ops.ssm import Ssm, chunk_size
from inl.spec.step import Step
from inl_jax.tensors import Array, einsum, upcast
from inl_jax.xla.kernel import kernel


def ssm_scan(
    x: Array, b: Array, c: Array, dt: Array, table: Array, step: Step, w: Ssm
) -> tuple[Array, Array]:
    (total, heads, width), (groups, dim) = x.shape, b.shape[1:]
    rows, shape = step.slots.shape[0], (groups, heads // groups)
    used = jnp.arange(rows) < step.used_counts[1]
    counts = jnp.where(used, step.starts[1:] - step.starts[:-1], 0)
    begins = step.starts[:-1]
    first = step.positions[jnp.clip(begins, 0, total - 1)] == 0
    fresh = (first | ~used).reshape(-1, 1, 1, 1)
    states = jnp.where(fresh, 0, upcast(table[step.slots]))
    states = states.reshape(rows, *shape, dim, width)
    time = jax.nn.softplus(upcast(dt) + upcast(w.shift))
    decays = (-jnp.exp(upcast(w.rate)) * time).reshape(total, *shape)
    timed = (upcast(x) * time[..., None]).reshape(total, *shape, width)
    size = chunk_size(total, rows)
    order = jnp.arange(size)
    later, since = order[:, None] > order, order[:, None] >= order

    def body(at: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        inside = at * size + order < counts[:, None]
        tokens = jnp.clip(begins[:, None] + at * size + order, 0, total - 1)

        def read(given: Array) -> Array:
            mask = inside.reshape(*inside.shape, *(1,) * (given.ndim - 1))
            return jnp.where(mask, given[tokens], 0)

        keys, queries = read(upcast(b)), read(upcast(c))
        decay, value = read(decays), read(timed)
        # Differences of running sums would lose small decays behind a large one.
        after = jnp.where(later[:, :, None, None], decay[:, :, None], 0)
        between = jnp.exp(jnp.cumsum(after, axis=1))
        between = jnp.where(since[:, :, None, None], between, 0)
        running = jnp.exp(jnp.cumsum(decay, axis=1))
        score = einsum("rtgd,rjgd->rtjg", queries, keys)
        found = einsum("rtjgs,rjgsn->rtgsn", score[..., None] * between, value)
        past = einsum("rtgd,rgsdn->rtgsn", queries, states)
        found = found + running[..., None] * past
        last = jnp.exp(after.sum(1))[..., None] * value
        states = states * running[:, -1, :, :, None, None]
        states = states + einsum("rjgd,rjgsn->rgsdn", keys, last)
        places = jnp.where(inside, tokens, total)  # out of range: dropped
        return out.at[places].set(found, mode="drop"), states

    steps = -(-counts.max() // size)
    carry = jnp.zeros_like(timed), states
    out, states = jax.lax.fori_loop(0, steps, body, carry)
    results = out.reshape(x.shape) + upcast(x) * upcast(w.skip)[:, None]
    states = states.reshape(rows, heads, dim, width).astype(table.dtype)
    return results.astype(x.dtype), table.at[step.slots].set(states).at[0].set(0)


KERNELS = (kernel(ssm_scan),)
