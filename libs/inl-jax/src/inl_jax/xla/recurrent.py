"""Recurrent layers: the delta rule takes one token of each row after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from inl.ops.recurrent import LENGTH_EPS, Decay, Taps
from inl.spec.step import Step
from inl_jax.tensors import Array, einsum, upcast
from inl_jax.xla.kernel import kernel


def _scan(
    out: Array, table: Array, step: Step, advance: Callable[[Array, Array], Any]
) -> tuple[Array, Array]:
    """Apply ``advance(tokens [R], states) -> (outputs, states)`` to each row's tokens.

    Returns the outputs, shaped as ``out``, and the table with the last states.
    """
    rows, total = step.slots.shape[0], out.shape[0]
    used = jnp.arange(rows) < step.used_counts[1]
    counts = jnp.where(used, step.starts[1:] - step.starts[:-1], 0)
    first = step.positions[jnp.clip(step.starts[:-1], 0, total - 1)] == 0
    fresh = (first | ~used).reshape(-1, *(1,) * (table.ndim - 1))
    states = jnp.where(fresh, 0, upcast(table[step.slots]))

    def body(at: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, states = carry
        tokens = jnp.clip(step.starts[:-1] + at, 0, total - 1)
        found, changed = advance(tokens, states)
        live = at < counts
        places = jnp.where(live, tokens, total)  # out of range: dropped
        out = out.at[places].set(found.astype(out.dtype), mode="drop")
        kept = live.reshape(-1, *(1,) * (table.ndim - 1))
        return out, jnp.where(kept, changed, states)

    out, states = jax.lax.fori_loop(
        0, counts.max(), body, (jnp.zeros_like(out), states)
    )
    states = states.astype(table.dtype)
    return out, table.at[step.slots].set(states).at[0].set(0)


def causal_conv(x: Array, table: Array, step: Step, w: Taps) -> tuple[Array, Array]:
    total, taps, rows = x.shape[0], w.weight.shape[-1], step.slots.shape[0]
    used = jnp.arange(rows) < step.used_counts[1]
    begins = step.starts[:-1]
    first = step.positions[jnp.clip(begins, 0, total - 1)] == 0
    fresh = (first | ~used)[:, None, None]
    before, given = jnp.where(fresh, 0, upcast(table[step.slots])), upcast(x)
    weights = upcast(w.weight)[:, 0].T

    def inputs(rows: Array, at: Array) -> Array:
        """Return inputs of rows, counted from the first one that the table has."""
        token = jnp.clip(begins[rows] + at - (taps - 1), 0, total - 1)
        stored = before[rows, jnp.minimum(at, taps - 2)]
        return jnp.where((at < taps - 1)[..., None], stored, given[token])

    tokens = jnp.arange(total)
    at = tokens - begins[step.rows]
    out = sum(inputs(step.rows, at + tap) * weights[tap] for tap in range(taps))
    out = jnp.where((tokens < step.used_counts[2])[:, None], out, 0)
    counts = jnp.where(used, step.starts[1:] - begins, 0)
    last = counts[:, None] + jnp.arange(taps - 1)
    states = inputs(jnp.arange(rows)[:, None], last).astype(table.dtype)
    return out.astype(x.dtype), table.at[step.slots].set(states).at[0].set(0)


def delta_rule(
    q: Array, k: Array, v: Array, a: Array, b: Array, table: Array, step: Step,
    w: Decay, *, tiled: bool,
) -> tuple[Array, Array]:  # fmt: skip
    share = v.shape[1] // q.shape[1]
    q, k = (_unit(upcast(each)) for each in (q, k))
    if tiled:
        q, k = (jnp.tile(each, (1, share, 1)) for each in (q, k))
    else:
        q, k = (jnp.repeat(each, share, axis=1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    rates = -jnp.exp(upcast(w.rate)) * jax.nn.softplus(upcast(a) + upcast(w.shift))
    keep, strength = jnp.exp(rates), jax.nn.sigmoid(upcast(b))

    def advance(tokens: Array, states: Array) -> tuple[Array, Array]:
        key = k[tokens]
        states = states * keep[tokens][..., None, None]
        known = einsum("rhd,rhdn->rhn", key, states)
        change = strength[tokens][..., None] * (upcast(v[tokens]) - known)
        states = states + key[..., None] * change[:, :, None]
        return einsum("rhd,rhdn->rhn", q[tokens], states), states

    return _scan(v, table, step, advance)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + LENGTH_EPS)


KERNELS = (kernel(causal_conv), kernel(delta_rule))
