"""Sampling, scores and masks. All computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inl.spec.step import INVALID_TOKEN, PARAMS, TOP, Scores, Step, Tables
from inl_jax.tensors import Array, upcast
from inl_jax.xla.kernel import kernel
from inl_jax.xla.step import floats


def sample(
    logits: Array, step: Step, tables: Tables, *, sampler: str
) -> tuple[Array, Tables]:
    logits = upcast(logits)
    valid = jnp.isfinite(logits.max(-1))
    logits = jnp.where(valid[:, None], logits, 0)
    if sampler == "sample_filtered":
        tables = tables._replace(token_counts=count_inputs(step, tables))
        logits = penalize(logits, step.slots, tables)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    width = step.samples.shape[0] // step.slots.shape[0]
    if sampler != "greedy":
        params = jnp.repeat(tables.params[step.slots], width, axis=0)
        drawn = draw(logits, params, step.uniforms, filtered=sampler != "sample")
        tokens = jnp.where(params[:, 0] > 0, drawn, tokens)
    tokens = jnp.where(valid, tokens, INVALID_TOKEN)
    newest = jnp.maximum(tokens.reshape(-1, width)[:, -1], 0)
    return tokens, tables._replace(last=tables.last.at[step.slots].set(newest))


def count_inputs(step: Step, tables: Tables) -> Array:
    """Add the input token of each decoding row to its answer's token counts."""
    inputs = step.tokens[jnp.minimum(step.starts[:-1], step.tokens.shape[0] - 1)]
    decoding = jnp.arange(inputs.shape[0]) < step.used_counts[0]
    return tables.token_counts.at[step.slots, inputs].add(2 * decoding)


def penalize(logits: Array, slots: Array, tables: Tables) -> Array:
    counts, columns = tables.token_counts[slots], tables.params[slots].T[:, :, None]
    param = dict(zip(PARAMS, columns, strict=True))
    factor = param["repetition_penalty"]
    factor = jnp.where((counts > 0) & (factor > 0), factor, 1)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    answered = counts >> 1
    frequency = param["frequency_penalty"] * answered
    presence = param["presence_penalty"] * (answered > 0)
    return logits - frequency - presence + tables.bias[slots]


def draw(logits: Array, params: Array, uniforms: Array, *, filtered: bool) -> Array:
    """Return the first id at which the cumulative mass exceeds the uniform share."""
    heat = params[:, :1]
    shifted = logits - logits.max(-1, keepdims=True)
    scaled = shifted / jnp.where(heat > 0, heat, 1)
    mass = jnp.exp(scaled)
    if filtered:
        mass = jnp.where(allowed_tokens(scaled, params), mass, 0)
    total = jnp.cumsum(mass, axis=-1)
    below = total <= floats(uniforms)[:, None] * total[:, -1:]
    return jnp.minimum(below.sum(-1, dtype=jnp.int32), logits.shape[-1] - 1)


def allowed_tokens(scaled: Array, params: Array) -> Array:
    """Return which tokens top-k, top-p and min-p allow: bool [S, V]."""
    top_k, top_p, min_p = params.T[1:4, :, None]
    order = jnp.argsort(-(scaled + 0.0), axis=-1, stable=True)
    mass = jnp.exp(jnp.take_along_axis(scaled, order, axis=-1))
    rank = jnp.arange(scaled.shape[-1])
    allowed = (rank < top_k) | (top_k < 1)
    total = jnp.cumsum(jnp.where(allowed, mass, 0), axis=-1)
    before = jnp.pad(total[:, :-1], ((0, 0), (1, 0)))
    allowed &= (before < top_p * total[:, -1:]) | (top_p >= 1)
    allowed &= mass >= min_p
    allowed |= rank == 0
    rows = jnp.arange(len(allowed))[:, None]
    return jnp.zeros_like(allowed).at[rows, order].set(allowed)


def score(logits: Array, tokens: Array) -> Scores:
    logits = upcast(logits)
    logs = jax.nn.log_softmax(logits, axis=-1)
    order = jnp.argsort(-(logits + 0.0), axis=-1, stable=True)
    top = order[:, :TOP].astype(jnp.int32)
    chosen = jnp.take_along_axis(logs, tokens[:, None], axis=-1)[:, 0]
    return Scores(chosen, top, jnp.take_along_axis(logs, top, axis=-1))


def mask_logits(logits: Array, masks: Array) -> Array:
    index = jnp.arange(logits.shape[-1])
    allowed = (masks[:, index // 32] >> (index % 32)) & 1
    return jnp.where(allowed == 1, upcast(logits), -1e30)


KERNELS = (
    kernel(sample),
    kernel(score),
    kernel(mask_logits),
)
