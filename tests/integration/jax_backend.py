"""A throwaway backend on ``jax.jit``: right, not fast. It shows how little one is."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from inl.backend.base import Traits
from inl.backend.simple import simple_backend
from inl.dtypes import widen, wrap
from inl.ops.moe import LEAST
from inl.ops.rope import frequencies, gains
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    DRAFT,
    ROW_WORD,
    TOKEN_BIAS_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    draft_words,
    layout,
    row_words,
    uniform_words,
)
from inl.spec.step import NO_TOKEN, PARAMS, TOP, Bucket, Scores, Step, Tables
from inl_jax import functional as inl_functional

SPAN = 512
einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def make_step(message, tables, *, bucket, block_size):
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[place.rows : place.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
    given = message[place.tokens : place.size]
    slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]
    at = UPDATE_WORD
    entries = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
    blocks = tables.blocks.at[entries].set(updates[:, at.block])
    before = tables.lengths[slots]
    after = jnp.where(counts > 0, before + counts, 0)
    ends = jnp.cumsum(counts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(bucket.tokens, dtype=jnp.int32)
    used = index < ends[-1]
    row = jnp.where(used, (index[:, None] >= ends).sum(1, dtype=jnp.int32), 0)
    positions = jnp.where(used, before[row] + index - starts[row], 0)
    homes = blocks[:, slots][:, row, positions // block_size]
    offsets = jnp.arange(bucket.tokens_per_row, dtype=jnp.int32) - bucket.tokens_per_row
    samples = jnp.maximum(ends[:, None] + offsets, starts[:-1, None])
    samples = jnp.clip(samples, 0, bucket.tokens - 1).reshape(-1)
    if bucket.verifies:
        samples = index
    tokens = jnp.where(given < 0, tables.last[slots][row], given)
    uniforms = rows[:, uniform_words(bucket)]
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        drafted = drafts[row, positions % drafts.shape[1]]
        tokens = jnp.where(given == DRAFT, drafted, tokens)
        at = (positions[samples] + 1) % uniforms.shape[1]
        uniforms = uniforms[row[samples], at]
    step = Step(
        tokens=tokens,
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots,
        blocks=blocks[:, slots],
        writes=jnp.where(used, homes * block_size + positions % block_size, 0),
        samples=samples,
        adapters=tables.adapters[slots],
        used_counts=message[USED_COUNTS],
        uniforms=uniforms.reshape(-1),
    )
    lengths = tables.lengths.at[slots].set(after)
    return step, tables._replace(blocks=blocks, lengths=lengths)


def prune_last_layer(step):
    at, rows, used = step.samples, step.lengths.shape[0], step.used_counts[1]
    return step._replace(
        tokens=step.tokens[at],
        positions=step.positions[at],
        rows=step.rows[at],
        starts=jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), used),
        writes=step.writes[:, at],
        samples=jnp.arange(rows, dtype=jnp.int32),
        used_counts=jnp.full(3, used),
        plan=(),
    )


def admit(messages, tables):
    at = ADMISSION_WORD
    slot = messages[:, at.slot]
    bits = messages[:, at.params : at.blocks]
    params = jax.lax.bitcast_convert_type(bits, jnp.float32)
    groups, _, width = tables.blocks.shape
    blocks = messages[:, at.blocks :].reshape(-1, groups, width).swapaxes(0, 1)
    return tables._replace(
        blocks=tables.blocks.at[:, slot].set(blocks),
        lengths=tables.lengths.at[slot].set(messages[:, at.length]),
        last=tables.last.at[slot].set(messages[:, at.last]),
        adapters=tables.adapters.at[slot].set(messages[:, at.adapter]),
        params=tables.params.at[slot].set(params),
        token_counts=tables.token_counts.at[slot].set(0),
        bias=tables.bias.at[slot].set(0),
    )


def mark(message, tables):
    slot = message[TOKEN_BIAS_WORD.slot]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
    ids, counts = entries[:, BIAS_WORD.token], entries[:, BIAS_WORD.token_count]
    bias = jax.lax.bitcast_convert_type(entries[:, BIAS_WORD.bias], jnp.float32)
    return tables._replace(
        token_counts=tables.token_counts.at[slot, ids].add(counts),
        bias=tables.bias.at[slot, ids].add(bias),
    )


def linear(x, w):
    y = einsum("...k,nk->...n", x, w.weight)
    return y if w.bias is None else y + w.bias


def rms_norm(x, w, *, eps):
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps) * w.weight


def rope_table(positions, *, dim, theta, scaling):
    # One float32 angle would be wrong in the fourth digit at 8,192: two small tables
    # and the addition theorem are not. Positions up to SPAN * SPAN.
    rates = frequencies(dim, theta, scaling)
    near = np.exp(1j * np.arange(SPAN)[:, None] * rates)
    far = np.exp(1j * SPAN * np.arange(SPAN)[:, None] * rates)
    part = partial(jnp.asarray, dtype=jnp.float32)
    a, b = part(near.real)[positions % SPAN], part(near.imag)[positions % SPAN]
    c, d = part(far.real)[positions // SPAN], part(far.imag)[positions // SPAN]
    length = part(gains(dim, scaling))
    return (a * c - b * d) * length, (a * d + b * c) * length


def rotate(x, cos, sin):
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope(q, k, cos, sin):
    return rotate(q, cos, sin), rotate(k, cos, sin)


def write_kv(k, v, cache, writes):
    size = cache.k.shape[1]
    block, offset = writes // size, writes % size
    return Cache(cache.k.at[block, offset].set(k), cache.v.at[block, offset].set(v))


def attention(q, cache, step, *, scale, window, cap, group):
    tokens, _, dim = q.shape
    kv_heads = cache.k.shape[2]
    table = step.blocks[group]
    k, v = (
        part[table].reshape(table.shape[0], -1, kv_heads, dim)[step.rows]
        for part in cache
    )
    mine = q.reshape(tokens, kv_heads, -1, dim)
    scores = einsum("tkgd,tlkd->tkgl", mine, k) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    distance = step.positions[:, None] - jnp.arange(k.shape[1])
    seen = (distance >= 0) & (distance < (window or k.shape[1]))
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    out = einsum("tkgl,tlkd->tkgd", jax.nn.softmax(scores, axis=-1), v)
    used = jnp.arange(tokens) < step.starts[-1]
    return jnp.where(used[:, None, None], out.reshape(q.shape), 0)


def gated_activation(gate, up, *, activation):
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=True) * up


def read_slots(table, step):
    index = jnp.arange(step.tokens.shape[0])
    continues = (index < step.used_counts[2]) & (step.rows < step.used_counts[0])
    continues = continues.reshape(-1, *(1,) * (table.ndim - 1))
    return jnp.where(continues, table[step.slots[step.rows]], 0)


def write_slots(x, table, step):
    used = jnp.arange(step.slots.shape[0]) < step.used_counts[1]
    used = used.reshape(-1, *(1,) * (table.ndim - 1))
    last = jnp.clip(step.starts[1:] - 1, 0, x.shape[0] - 1)
    return table.at[step.slots].set(jnp.where(used, x[last], 0))


def token_routed_mlp(x, tokens, mu, w):
    count = w.gate_up.shape[0]
    chosen = tokens % count if w.experts is None else w.experts[tokens]
    if w.router is not None:
        votes = 10.0 * jax.nn.one_hot(chosen, count)
        chosen = jnp.argmax(votes + einsum("th,eh->te", mu, w.router), axis=-1)
    gate, up = jnp.split(einsum("th,thi->ti", x, w.gate_up[chosen]), 2, axis=-1)
    return einsum("ti,tih->th", jax.nn.silu(gate) * up, w.down[chosen])


def route(logits, *, k, kind, renormalize):
    lost = jnp.isnan(logits)
    ids = best(jnp.where(lost, -jnp.inf, logits), k)
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    if kind == "softmax_topk":
        shares = jax.nn.softmax(logits, axis=-1)
        weights = jnp.take_along_axis(shares, ids, axis=-1)
    elif kind == "topk_softmax":
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        weights = jax.nn.sigmoid(chosen)
    if renormalize:
        weights /= jnp.maximum(weights.sum(-1, keepdims=True), LEAST)
    return ids, jnp.where(lost.any(-1, keepdims=True), jnp.nan, weights)


def best(scores, k):
    # XLA sorts -0.0 below 0.0; adding zero makes them one.
    order = jnp.argsort(-(scores + 0.0), axis=-1, stable=True)
    return order[:, :k].astype(jnp.int32)


def expert_linear(x, ids, w):
    # A copy of the matrix for each slot: right, not fast.
    x = jnp.broadcast_to(x, (*ids.shape, x.shape[-1]))
    return einsum("tsk,tsnk->tsn", x, w.weight[ids])


def drop_overflow(ids, weights, *, experts, capacity):
    chosen = (ids[:, :, None] == jnp.arange(experts)).any(1).astype(jnp.int32)
    before = jnp.cumsum(chosen, axis=0) - chosen
    kept = jnp.take_along_axis(before, ids, axis=-1) < capacity
    kept = jnp.where(kept, weights, 0)
    return kept / jnp.maximum(kept.sum(-1, keepdims=True), LEAST)


def load_balance_loss(logits, *, k):
    count = logits.shape[-1]
    share = jnp.bincount(best(logits, k).reshape(-1), length=count) / logits.shape[0]
    return count / k * (share * jax.nn.softmax(logits, axis=-1).mean(0)).sum()


def sample(logits, step, tables, *, sampler):
    if sampler == "sample_filtered":
        tables = tables._replace(token_counts=counted(step, tables))
        logits = penalized(logits, step.slots, tables)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    width = step.samples.shape[0] // step.slots.shape[0]
    if sampler != "greedy":
        params = jnp.repeat(tables.params[step.slots], width, axis=0)
        heat = params[:, :1]
        shifted = logits - logits.max(-1, keepdims=True)
        scaled = shifted / jnp.where(heat > 0, heat, 1)
        mass = jnp.exp(scaled)
        if sampler == "sample_filtered":
            mass = jnp.where(kept(scaled, params), mass, 0)
        total = jnp.cumsum(mass, axis=-1)
        uniform = jax.lax.bitcast_convert_type(step.uniforms, jnp.float32)[:, None]
        drawn = (total <= uniform * total[:, -1:]).sum(-1, dtype=jnp.int32)
        drawn = jnp.minimum(drawn, logits.shape[-1] - 1)
        tokens = jnp.where(heat[:, 0] > 0, drawn, tokens)
    last = tables.last.at[step.slots].set(tokens.reshape(-1, width)[:, -1])
    return tokens, tables._replace(last=last)


def expand_rows(step, tables):
    index = jnp.arange(step.tokens.shape[0], dtype=jnp.int32)
    used = index < step.used_counts[2]
    slots = jnp.where(used, step.slots[step.rows], 0)
    counts = tables.token_counts[slots]
    if counts.shape[1]:
        before = (step.rows[:, None] == step.rows) & (index[:, None] > index)
        before &= used[:, None] & used
        added = 2 * before.astype(jnp.int32)
        counts = counts.at[index[:, None], step.tokens[None]].add(added)
    zeros = jnp.zeros_like(index)
    expanded = step._replace(
        starts=jnp.arange(len(index) + 1, dtype=jnp.int32),
        slots=index,
        samples=index,
        used_counts=jnp.full(3, step.used_counts[2]),
    )
    blocks = jnp.zeros((1, len(index), tables.blocks.shape[2]), jnp.int32)
    rows = (part[slots] for part in (tables.params, tables.bias))
    params, bias = rows
    return expanded, Tables(blocks, zeros, zeros, zeros, params, counts, bias)


def verify(tokens, step, tables, *, width):
    counts = step.starts[1:] - step.starts[:-1]
    offsets = jnp.arange(width)
    inside = offsets < counts[:, None]
    at = jnp.where(inside, step.starts[:-1, None] + offsets, 0)
    sampled = jnp.where(inside, tokens[at], NO_TOKEN)
    inputs = step.tokens[at]
    agrees = inside[:, 1:] & (sampled[:, :-1] == inputs[:, 1:])
    agrees = jnp.pad(agrees, ((0, 0), (1, 0)), constant_values=True)
    kept = inside & (jnp.cumprod(agrees, axis=1) > 0)
    accepted = kept.sum(1, dtype=jnp.int32)
    ends = jnp.maximum(accepted - 1, 0)[:, None]
    last = jnp.maximum(jnp.take_along_axis(sampled, ends, axis=1)[:, 0], 0)
    lengths = tables.lengths.at[step.slots].set(step.lengths - (counts - accepted))
    added = tables.token_counts
    if added.shape[1]:
        added = added.at[step.slots[:, None], inputs].add(2 * kept.astype(jnp.int32))
    tables = tables._replace(
        lengths=lengths, last=tables.last.at[step.slots].set(last), token_counts=added
    )
    return jnp.where(kept, sampled, NO_TOKEN).reshape(-1), tables


def counted(step, tables):
    fed = step.tokens[jnp.minimum(step.starts[:-1], step.tokens.shape[0] - 1)]
    decoding = jnp.arange(fed.shape[0]) < step.used_counts[0]
    return tables.token_counts.at[step.slots, fed].add(2 * decoding)


def penalized(logits, slots, tables):
    counts, columns = tables.token_counts[slots], tables.params[slots].T[:, :, None]
    param = dict(zip(PARAMS, columns, strict=True))
    factor = param["repetition_penalty"]
    factor = jnp.where((counts > 0) & (factor > 0), factor, 1)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    answered = counts >> 1
    frequency = param["frequency_penalty"] * answered
    presence = param["presence_penalty"] * (answered > 0)
    return logits - frequency - presence + tables.bias[slots]


def kept(scaled, params):
    top_k, top_p, min_p = params.T[1:4, :, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    mass = jnp.exp(jnp.take_along_axis(scaled, order, axis=-1))
    rank = jnp.arange(scaled.shape[-1])
    left = (rank < top_k) | (top_k < 1)
    total = jnp.cumsum(jnp.where(left, mass, 0), axis=-1)
    before = jnp.pad(total[:, :-1], ((0, 0), (1, 0)))
    left &= (before < top_p * total[:, -1:]) | (top_p >= 1)
    left &= mass >= min_p
    left |= rank == 0
    return jnp.zeros_like(left).at[jnp.arange(len(left))[:, None], order].set(left)


def score(logits, tokens):
    logs = jax.nn.log_softmax(logits, axis=-1)
    top = jnp.argsort(-logits, axis=-1, stable=True)[:, :TOP].astype(jnp.int32)
    chosen = jnp.take_along_axis(logs, tokens[:, None], axis=-1)[:, 0]
    return Scores(chosen, top, jnp.take_along_axis(logs, top, axis=-1))


def mask_logits(logits, masks):
    index = jnp.arange(logits.shape[-1])
    allowed = (masks[:, index // 32] >> (index % 32)) & 1
    return jnp.where(allowed == 1, logits, -1e30)


KERNELS = {
    "make_step": make_step,
    "prune_last_layer": prune_last_layer,
    "admit": admit,
    "set_token_bias": mark,
    "embedding": lambda tokens, w: w.weight[tokens],
    "take_rows": lambda x, index: x[index],
    "zeros_like": jnp.zeros_like,
    "linear": linear,
    "soft_cap": lambda x, *, cap: cap * jnp.tanh(x / cap),
    "rms_norm": rms_norm,
    "all_reduce": lambda x, *, axis: x,
    "all_gather": lambda x, *, axis: x,
    "rope_table": rope_table,
    "rope": rope,
    "write_kv": write_kv,
    "attention": attention,
    "gated_activation": gated_activation,
    "silu": jax.nn.silu,
    "clip": lambda x, *, low, high: jnp.clip(x, low, high),
    "inl_dynamics": inl_functional.inl_dynamics,
    "inl_dynamics_step": inl_functional.inl_dynamics_step,
    "inl_dynamics_n_steps": inl_functional.inl_dynamics_n_steps,
    "read_slots": read_slots,
    "write_slots": write_slots,
    "token_routed_mlp": token_routed_mlp,
    "route": route,
    "expert_linear": expert_linear,
    "combine_experts": lambda y, weights: (y * weights[:, :, None]).sum(1),
    "sigmoid_gate": lambda x, gate: x * jax.nn.sigmoid(gate),
    "drop_overflow": drop_overflow,
    "load_balance_loss": load_balance_loss,
    "sample": sample,
    "expand_rows": expand_rows,
    "verify": verify,
    "mask_logits": mask_logits,
    "score": score,
}


def buckets(limits):
    """Few: each costs seconds to compile."""
    rows = min(8, limits.slots - 1)
    shapes = sorted({(1, 1), (rows, rows), (max(64, rows), rows)})
    if limits.max_drafts:
        width = limits.max_drafts + 1
        shapes += [(width, 1, width), (rows * width, rows, width)]
    return [
        Bucket(*(*shape, 1)[:3], sampler=name)
        for shape in shapes
        for name in limits.samplers
    ]


def jit(function, bucket, consumes):
    return jax.jit(function, donate_argnums=tuple(consumes))


def jax_backend(*, replaced=None, compile=jit):  # noqa: A002
    """The backend's class; tests plant their faults through ``replaced`` kernels."""
    run = {**KERNELS, **(replaced or {})}
    return simple_backend(
        # A copy: JAX may alias host memory that its owner writes to again.
        tensor=lambda data: jnp.array(widen(data), copy=True),
        numpy=lambda x: wrap(np.asarray(x)),
        kernels=lambda: [Kernel(name, "jax", run[name]) for name in run],
        compile=compile,
        buckets=buckets,
        traits=Traits(dtypes=("float32",), block_size=16, depth=2),
    )
