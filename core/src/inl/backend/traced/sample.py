"""Sampling, scores and masks. All computed in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from inl.spec.step import INVALID_TOKEN, PARAMS, TOP, Array, Scores, Step, Tables


def sample(
    xp: Any, logits: Array, step: Step, tables: Tables, *, sampler: str
) -> tuple[Array, Tables]:
    logits = xp.upcast(logits)
    valid = xp.has_finite_max(logits)
    logits = xp.where(valid, logits, 0)
    if sampler == "sample_filtered":
        tables = tables._replace(token_counts=count_inputs(xp, step, tables))
        logits = penalize(xp, logits, step.slots, tables)
    tokens = xp.argmax(logits)
    rows = step.slots.shape[0]
    width = step.samples.shape[0] // rows
    if sampler != "greedy":
        params = xp.take(tables.params, step.slots)
        columns = params.shape[1]
        params = xp.broadcast_to(params[:, None], (rows, width, columns))
        params = params.reshape(-1, columns)
        drawn = draw(xp, logits, params, step.uniforms, filtered=sampler != "sample")
        tokens = xp.where(params[:, 0] > 0, drawn, tokens)
    tokens = xp.where(valid[:, 0], tokens, INVALID_TOKEN)
    newest = xp.maximum(tokens.reshape(-1, width)[:, -1], 0)
    return tokens, tables._replace(last=xp.put(tables.last, [step.slots], newest))


def count_inputs(xp: Any, step: Step, tables: Tables) -> Array:
    """Add the input token of each decoding row to its answer's token counts."""
    first = xp.minimum(step.starts[:-1], step.tokens.shape[0] - 1)
    inputs = xp.take(step.tokens, first)
    decoding = xp.arange(inputs, inputs.shape[0]) < step.used_counts[0]
    added = decoding.astype("int32") * 2
    return xp.put(tables.token_counts, [step.slots, inputs], added, add=True)


def penalize(xp: Any, logits: Array, slots: Array, tables: Tables) -> Array:
    counts, params = xp.take(tables.token_counts, slots), xp.take(tables.params, slots)
    param = {name: params[:, i : i + 1] for i, name in enumerate(PARAMS)}
    factor = param["repetition_penalty"]
    factor = xp.where((counts > 0) & (factor > 0), factor, 1)
    logits = xp.where(logits > 0, logits / factor, logits * factor)
    answered = (counts >> 1).astype("float32")
    frequency = param["frequency_penalty"] * answered
    presence = param["presence_penalty"] * (answered > 0).astype("float32")
    return logits - frequency - presence + xp.take(tables.bias, slots)


def draw(
    xp: Any, logits: Array, params: Array, uniforms: Array, *, filtered: bool
) -> Array:
    """Return the first id at which the cumulative mass exceeds the uniform share."""
    heat = params[:, :1]
    shifted = logits - xp.max_of(logits, keepdims=True)
    scaled = shifted / xp.where(heat > 0, heat, 1)
    mass = xp.exp(scaled)
    if filtered:
        mass = xp.where(allowed_tokens(xp, scaled, params), mass, 0)
    total = xp.cumsum(mass)
    below = total <= xp.floats(uniforms)[:, None] * total[:, -1:]
    return xp.minimum(xp.sum_of(below.astype("int32")), logits.shape[-1] - 1)


def allowed_tokens(xp: Any, scaled: Array, params: Array) -> Array:
    """Return which tokens top-k, top-p and min-p allow: bool [S, V]."""
    top_k, top_p, min_p = (params[:, index : index + 1] for index in (1, 2, 3))
    order = xp.top(scaled, scaled.shape[-1])
    mass = xp.exp(xp.take_along(scaled, order))
    rank = xp.arange(order, scaled.shape[-1]).astype("float32")
    allowed = (rank < top_k) | (top_k < 1)
    total = xp.cumsum(xp.where(allowed, mass, 0))
    nothing = xp.full(total, (total.shape[0], 1), 0, "float32")
    before = xp.concatenate([nothing, total[:, :-1]], 1)
    allowed = allowed & ((before < top_p * total[:, -1:]) | (top_p >= 1))
    allowed = allowed & (mass >= min_p)
    return xp.unsorted(order, allowed | xp.equal(rank, 0))


def score(xp: Any, logits: Array, tokens: Array) -> Scores:
    logits = xp.upcast(logits)
    logs = xp.log_softmax(logits)
    ids = xp.top(logits, min(TOP, logits.shape[-1]))
    # An invalid token has no score; any index will do.
    chosen = xp.take_along(logs, xp.maximum(tokens, 0)[:, None])[:, 0]
    return Scores(chosen=chosen, ids=ids, values=xp.take_along(logs, ids))


def mask_logits(xp: Any, logits: Array, masks: Array) -> Array:
    bits = (np.int64(1) << np.arange(32)).astype(np.uint32).view(np.int32)
    masked = xp.equal(masks[:, :, None] & bits, 0).reshape(masks.shape[0], -1)
    return xp.where(masked[:, : logits.shape[-1]], -1e30, xp.upcast(logits))
