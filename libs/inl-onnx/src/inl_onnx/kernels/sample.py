"""Sampling, scores and masks. All computed in float32."""

from __future__ import annotations

import numpy as np

from inl.spec.step import INVALID_TOKEN, PARAMS, TOP, Scores, Step, Tables
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def sample(
    logits: Value, step: Step, tables: Tables, *, sampler: str
) -> tuple[Value, Tables]:
    logits = fn.upcast(logits)
    highest = fn.max_of(fn.where(fn.isnan(logits), np.inf, logits), keepdims=True)
    valid = ~fn.isinf(highest)
    logits = fn.where(valid, logits, 0)
    if sampler == "sample_filtered":
        tables = tables._replace(token_counts=count_inputs(step, tables))
        logits = penalize(logits, step.slots, tables)
    tokens = fn.argmax(logits)
    rows = step.slots.shape[0]
    width = step.samples.shape[0] // rows
    if sampler != "greedy":
        params = fn.take(tables.params, step.slots)
        columns = params.shape[1]
        params = fn.broadcast_to(params[:, None], (rows, width, columns))
        params = params.reshape(-1, columns)
        drawn = draw(logits, params, step.uniforms, filtered=sampler != "sample")
        tokens = fn.where(params[:, 0] > 0, drawn, tokens)
    tokens = fn.where(valid[:, 0], tokens, INVALID_TOKEN)
    newest = fn.maximum(tokens.reshape(-1, width)[:, -1], 0)
    return tokens, tables._replace(last=fn.put(tables.last, [step.slots], newest))


def count_inputs(step: Step, tables: Tables) -> Value:
    """Add the input token of each decoding row to its answer's token counts."""
    first = fn.minimum(step.starts[:-1], step.tokens.shape[0] - 1)
    inputs = fn.take(step.tokens, first)
    decoding = fn.arange(inputs, inputs.shape[0]) < step.used_counts[0]
    added = decoding.astype("int32") * 2
    return fn.put(tables.token_counts, [step.slots, inputs], added, add=True)


def penalize(logits: Value, slots: Value, tables: Tables) -> Value:
    counts, params = fn.take(tables.token_counts, slots), fn.take(tables.params, slots)
    param = {name: params[:, i : i + 1] for i, name in enumerate(PARAMS)}
    factor = param["repetition_penalty"]
    factor = fn.where((counts > 0) & (factor > 0), factor, 1)
    logits = fn.where(logits > 0, logits / factor, logits * factor)
    answered = (counts // 2).astype("float32")
    frequency = param["frequency_penalty"] * answered
    presence = param["presence_penalty"] * (answered > 0).astype("float32")
    return logits - frequency - presence + fn.take(tables.bias, slots)


def draw(logits: Value, params: Value, uniforms: Value, *, filtered: bool) -> Value:
    """Return the first id at which the cumulative mass exceeds the uniform share."""
    heat = params[:, :1]
    shifted = logits - fn.max_of(logits, keepdims=True)
    scaled = shifted / fn.where(heat > 0, heat, 1)
    mass = fn.exp(scaled)
    if filtered:
        mass = fn.where(allowed_tokens(scaled, params), mass, 0)
    total = fn.cumsum(mass)
    below = total <= fn.floats(uniforms)[:, None] * total[:, -1:]
    return fn.minimum(fn.sum_of(below.astype("int32")), logits.shape[-1] - 1)


def allowed_tokens(scaled: Value, params: Value) -> Value:
    """Return which tokens top-k, top-p and min-p allow: bool [S, V]."""
    top_k, top_p, min_p = (params[:, index : index + 1] for index in (1, 2, 3))
    order = fn.top(scaled, scaled.shape[-1])
    mass = fn.exp(fn.take_along(scaled, order))
    rank = fn.arange(order, scaled.shape[-1]).astype("float32")
    allowed = (rank < top_k) | (top_k < 1)
    total = fn.cumsum(fn.where(allowed, mass, 0))
    nothing = fn.full(total, (total.shape[0], 1), 0, "float32")
    before = fn.concatenate([nothing, total[:, :-1]], 1)
    allowed = allowed & ((before < top_p * total[:, -1:]) | (top_p >= 1))
    allowed = allowed & (mass >= min_p)
    allowed = (allowed | rank.equal(0)).astype("int32")
    zeros = fn.full(allowed, allowed.shape, 0, "int32")
    return fn.put_along(zeros, order, allowed) > 0


def score(logits: Value, tokens: Value) -> Scores:
    logits = fn.upcast(logits)
    logs = logits.node("LogSoftmax", axis=-1)
    ids = fn.top(logits, min(TOP, logits.shape[-1]))
    # An invalid token has no score; any index will do.
    chosen = fn.take_along(logs, fn.maximum(tokens, 0)[:, None])[:, 0]
    return Scores(chosen, ids, fn.take_along(logs, ids))


def mask_logits(logits: Value, masks: Value) -> Value:
    bits = (np.int64(1) << np.arange(32)).astype(np.uint32).view(np.int32)
    allowed = ~(masks[:, :, None] & bits).equal(0)
    allowed = allowed.reshape(masks.shape[0], -1)[:, : logits.shape[-1]]
    return fn.where(allowed, fn.upcast(logits), -1e30)


KERNELS = (
    kernel(sample),
    kernel(score),
    kernel(mask_logits),
)
