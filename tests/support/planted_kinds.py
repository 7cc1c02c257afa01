"""Wrong kernels of the kinds that vendors ship, for NumPy and for traced JAX.

A fault is right for small sizes and ordinary values: a tile that is not covered, a
number that is too narrow, a branch of one size, or a sum without a guard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SLIGHTLY = np.float32(1.01)


class Kind(NamedTuple):
    """A wrong kernel of ``op``; ``case``: a case that is wrong with it."""

    op: str
    case: str
    plant: Any
    """(NumPy or jax.numpy, right kernel) -> wrong kernel."""


def first(found, change):
    """Change the first array of a result."""
    if isinstance(found, tuple):
        return type(found)(change(found[0]), *found[1:]) if type(found) is tuple else (
            found._replace(**{found._fields[0]: change(found[0])})
        )  # fmt: skip
    return change(found)


def spread(xp, mask, y, axis=0):
    return mask.reshape(*(1,) * axis, -1, *(1,) * (y.ndim - axis - 1))


def lost(axis, count, value=0):
    """The first result is not computed beyond ``count`` on an axis."""

    def plant(xp, run):
        def kernel(*args, **attrs):
            def cut(y):
                at = axis % y.ndim
                kept = spread(xp, xp.arange(y.shape[at]) < count, y, at)
                return xp.where(kept, y, value).astype(y.dtype)

            return first(run(*args, **attrs), cut)

        return kernel

    return plant


def broken_where(is_wrong, wrong=lambda y: y * SLIGHTLY):
    """Rows of the first result are wrong where ``is_wrong(xp, y, *args)`` holds."""

    def plant(xp, run):
        def kernel(*args, **attrs):
            def change(y):
                found = is_wrong(xp, y, *args)
                if np.ndim(found) == 1:
                    found = spread(xp, found, y)
                return xp.where(found, wrong(y), y).astype(y.dtype)

            return first(run(*args, **attrs), change)

        return kernel

    return plant


def nothing(y):
    return y * np.float32("nan")


def other_attrs(change):
    """Attributes that the kernel replaces: change(args, attrs) -> attrs."""
    return lambda _xp, run: lambda *args, **attrs: run(*args, **change(args, attrs))


def other_args(change):
    """Arguments that the kernel narrows: change(xp, *args) -> args."""
    return lambda xp, run: lambda *args, **attrs: run(*change(xp, *args), **attrs)


def widest_score(xp, q):
    return xp.sqrt((q * q).sum(-1, keepdims=True))


def other_dim(dim, **changed):
    def change(args, attrs):
        return {**attrs, **changed} if args[0].shape[-1] == dim else attrs

    return other_attrs(change)


def other_scaling(kind, **changed):
    def change(_args, attrs):
        scaling = attrs["scaling"]
        same = scaling._replace(**changed) if scaling.kind == kind else scaling
        return {**attrs, "scaling": same}

    return other_attrs(change)


def far_in_row(least):
    def is_wrong(xp, _y, *args):
        step = next(x for x in args if hasattr(x, "starts"))
        index = xp.arange(step.rows.shape[0])
        return index - step.starts[:-1][step.rows] >= least

    return is_wrong


def state_of(is_wrong, wrong):
    """The state of the rows where ``is_wrong(counts, fresh, taps)`` holds."""

    def plant(xp, run):
        def kernel(x, table, step, w):
            y, after = run(x, table, step, w)
            taps = w.weight.shape[-1]
            counts = step.starts[1:] - step.starts[:-1]
            places = xp.clip(step.starts[:-1], 0, x.shape[0] - 1)
            used = xp.arange(counts.shape[0]) < step.used_counts[1]
            found = used & is_wrong(counts, step.positions[places] == 0, taps)
            older = xp.arange(taps - 1) < (taps - 1 - counts)[:, None]
            changed = (found[:, None] & older)[..., None]
            own = xp.where(changed, wrong(table[step.slots]), after[step.slots])
            if xp is np:
                after[step.slots] = own
                return y, after
            return y, after.at[step.slots].set(own)

        return kernel

    return plant


def last_block_wins(xp, run):
    """The maximum of each block of 1,024 columns, of which the last is taken."""

    def sample(logits, step, tables, *, sampler):
        tokens, *rest = run(logits, step, tables, sampler=sampler)
        if sampler != "greedy" or logits.shape[1] <= 1024:
            return tokens, *rest
        top = logits == logits.max(-1, keepdims=True)
        blocks = xp.arange(logits.shape[1]) // 1024
        last = xp.where(top, blocks, -1).max(-1, keepdims=True)
        found = xp.argmax(top & (blocks == last), axis=-1)
        return xp.where(tokens < 0, tokens, found).astype(tokens.dtype), *rest

    return sample


def token_where(is_wrong, token):
    """The token of samples whose uniform number is_wrong."""

    def plant(xp, run):
        def sample(logits, step, tables, *, sampler):
            tokens, *rest = run(logits, step, tables, sampler=sampler)
            if sampler == "greedy":
                return tokens, *rest
            wrong = is_wrong(step.uniforms)
            return xp.where(wrong, token(logits), tokens).astype(tokens.dtype), *rest

        return sample

    return plant


def other_tables(change):
    """Tables that the kernel reads otherwise: change(xp, tables) -> tables."""

    def plant(xp, run):
        def sample(logits, step, tables, *, sampler):
            given = change(xp, tables, logits)
            tokens, after, *more = run(logits, step, given, sampler=sampler)
            counts = tables.token_counts + after.token_counts - given.token_counts
            after = after._replace(
                params=tables.params, bias=tables.bias, token_counts=counts
            )
            return tokens, after, *more

        return sample

    return plant


def params_where(column, change):
    def replaced(xp, tables, _logits):
        at, p = xp.arange(tables.params.shape[1]) == column, tables.params
        return tables._replace(params=xp.where(at, change(xp, p), p).astype(p.dtype))

    return other_tables(replaced)


def narrow_counts(_xp, tables, _logits):
    return tables._replace(token_counts=tables.token_counts & 0xFF)


def narrow_bias(xp, tables, _logits):
    kept = xp.arange(tables.bias.shape[1]) < 32_768
    bias = xp.where(kept, tables.bias, 0).astype(tables.bias.dtype)
    return tables._replace(bias=bias)


def first_uniform(xp, run):
    def sample(logits, step, tables, *, sampler):
        width = step.samples.shape[0] // step.slots.shape[0]
        own = step.uniforms.reshape(-1, width)[:, :1]
        step = step._replace(uniforms=xp.repeat(own, width, axis=1).reshape(-1))
        return run(logits, step, tables, sampler=sampler)

    return sample


def two_of_a_tie(xp, ids, tied):
    swapped = xp.concatenate([ids[:, 1:2], ids[:, :1], ids[:, 2:]], 1)
    return xp.where(tied, swapped, ids)


def ties_of_scores(xp, run):
    def score(logits, tokens):
        found = run(logits, tokens)
        if logits.shape[1] <= 1024:
            return found
        tied = found.values[:, :1] == found.values[:, 1:2]
        return found._replace(ids=two_of_a_tie(xp, found.ids, tied))

    return score


def ties_of_experts(xp, run):
    def route(logits, *, k, **attrs):
        ids, weights = run(logits, k=k, **attrs)
        if k < 2 or logits.shape[1] <= 32:
            return ids, weights
        a, b = (xp.take_along_axis(logits, ids[:, i : i + 1], -1) for i in (0, 1))
        return two_of_a_tie(xp, ids, a == b), weights

    return route


def two_groups(xp, run):
    def make_step(message, tables, **attrs):
        step, after = run(message, tables, **attrs)
        blocks = xp.concatenate([after.blocks[:2], tables.blocks[2:]])
        own = step._replace(blocks=blocks[:, step.slots])
        return own, after._replace(blocks=blocks)

    return make_step


def step_where(field, change):
    def plant(xp, run):
        def make_step(message, tables, **attrs):
            step, after = run(message, tables, **attrs)
            return step._replace(**{field: change(xp, step)}), after

        return make_step

    return plant


def step_where_of(field, change):
    def plant(xp, run):
        def prune_last_layer(step):
            found = run(step)
            return found._replace(**{field: change(xp, found)})

        return prune_last_layer

    return plant


def narrow_adapters(_xp, run):
    def admit(messages, tables):
        after = run(messages, tables)
        return after._replace(adapters=after.adapters & 15)

    return admit


def narrow_updates(xp, run):
    """Token counts of ids beyond 65,535 are lost."""

    def verify(tokens, step, tables, *, width):
        found, after = run(tokens, step, tables, width=width)
        kept = xp.arange(tables.token_counts.shape[1]) < 65_536
        counts = xp.where(kept, after.token_counts, tables.token_counts)
        return found, after._replace(token_counts=counts)

    return verify


def narrow_expansion(xp, run):
    def expand_rows(step, tables):
        found, after = run(step, tables)
        kept = xp.arange(after.token_counts.shape[1]) < 65_536
        counts = xp.where(kept, after.token_counts, 0)
        return found, after._replace(token_counts=counts.astype(np.int32))

    return expand_rows


def lanes(count):
    """Columns of a matrix beyond the last whole vector of 16 are not read."""

    def plant(xp, run):
        def kernel(x, *rest):
            *more, w = rest
            size = x.shape[-1]
            kept = xp.arange(size) < (size - size % 16 if size > count else size)
            weight = xp.where(kept, w.weight, 0).astype(w.weight.dtype)
            return run(x, *more, w._replace(weight=weight))

        return kernel

    return plant


def even_slots(xp, run):
    def expert_linear(x, ids, w):
        y, count = run(x, ids, w), ids.shape[0] * ids.shape[1]
        kept = xp.arange(count) < (count - count % 2 if count > 64 else count)
        return xp.where(kept.reshape(*ids.shape, 1), y, 0).astype(y.dtype)

    return expert_linear


def lost_bias(xp, run):
    return lambda x, w: run(x, w if len(x) < 256 else w._replace(bias=None))


def lora(change):
    """A lora of its own; change: (xp, columns, rank) -> the columns that it reads."""

    def plant(xp, _run):
        def kernel(y, x, w, selected, *, rank):
            kept = change(xp.arange(selected.shape[1]), rank)
            inner = (x @ w.a.T) * xp.where(kept, selected, 0)
            return (y + inner @ w.b.T).astype(y.dtype)

        return kernel

    return plant


def short_lora(xp, _run):
    def kernel(y, x, w, selected, *, rank):
        added = ((x @ w.a.T) * selected) @ w.b.T
        kept = (xp.arange(len(y)) < 512)[:, None] & (xp.arange(y.shape[1]) < 4096)
        return (y + xp.where(kept, added, 0)).astype(y.dtype)

    return kernel


def first_group_only(xp, run):
    def chunk_rows(step, **attrs):
        found = run(step, **attrs)
        blocks = xp.broadcast_to(found.blocks[:1], found.blocks.shape)
        return found._replace(blocks=blocks)

    return chunk_rows


def reciprocal(xp, _run):
    def temper_queries(q, positions, *, floor, gain):
        whole = xp.floor((positions + 1).astype(np.float32) * np.float32(1 / floor))
        return q * (1 + gain * xp.log1p(whole)).astype(q.dtype)[:, None, None]

    return temper_queries


def keys_of(size):
    return broken_where(lambda _xp, _y, _q, cache, *_: cache.k.shape[1] == size)


def rows_of(xp, step):
    return xp.where(step.rows >= 200, 0, step.positions).astype(step.positions.dtype)


def writes_of(xp, step):
    kept = xp.arange(step.writes.shape[1]) < 1024
    return xp.where(kept, step.writes, 0).astype(step.writes.dtype)


def cells_of(size):
    """Keys are wrong in blocks of ``size`` tokens."""

    def plant(_xp, run):
        def write_kv(k, v, cache, writes):
            after = run(k, v, cache, writes)
            if cache.k.shape[1] == size:
                after = after._replace(k=after.k * SLIGHTLY)
            return after

        return write_kv

    return plant


def last_head(xp, run):
    """The last query head of a group of 7 or more reads that of the first group."""

    def attention(q, cache, step, **attrs):
        y, kv_heads = run(q, cache, step, **attrs), cache.k.shape[2]
        if kv_heads == 1 or q.shape[1] // kv_heads < 7:
            return y
        last = (xp.arange(y.shape[1]) == y.shape[1] - 1)[:, None]
        return xp.where(last, y[:, :1], y)

    return attention


def forgotten_window(xp, run):
    def attention(q, cache, step, *, window, **attrs):
        y = run(q, cache, step, window=window, **attrs)
        if not window:
            return y
        long = (step.lengths[step.rows] > 2048)[:, None, None]
        return xp.where(long, run(q, cache, step, window=None, **attrs), y)

    return attention


def narrow_normalizer(xp, run):
    def score(logits, tokens):
        found = run(logits, tokens)
        if logits.shape[1] <= 1024:
            return found
        top = logits.max(-1, keepdims=True)
        shares = xp.exp(logits - top)
        missing = xp.log(shares.sum(-1)) - xp.log(shares[:, :1024].sum(-1) + 1e-30)
        return found._replace(chosen=(found.chosen + missing).astype(np.float32))

    return score


def eager_drafts(xp, run):
    """With 4 drafts or more, the first one is accepted, right or wrong."""

    def verify(tokens, step, tables, *, width):
        if width > 4:
            first = step.starts[:-1][step.rows]
            index = xp.arange(tokens.shape[0])
            following = xp.concatenate([step.tokens[1:], step.tokens[:1]])
            tokens = xp.where(index == first, following, tokens)
        return run(tokens, step, tables, width=width)

    return verify


def far_blocks(_xp, run):
    def write_kv(k, v, cache, writes):
        size = cache.k.shape[1]
        return run(k, v, cache, writes // size % 256 * size + writes % size)

    return write_kv


def whole_tiles_of_columns(xp, run):
    def linear(x, w):
        y = run(x, w)
        count = y.shape[1] - y.shape[1] % 64 if y.shape[1] > 1000 else y.shape[1]
        return xp.where(xp.arange(y.shape[1]) < count, y, 0)

    return linear


def few_writes(_xp, run):
    return lambda k, v, cache, writes: run(k[:1024], v[:1024], cache, writes[:1024])


EXPONENT = 88  # above, exp overflows float32

KINDS = {
    "a window that long rows forget": Kind(
        "attention", "context 4100/4/2x16/window 1024", forgotten_window),
    "the last head of a group": Kind("attention", "mixed/14/2x64", last_head),
    "blocks in 8 bits": Kind("write_kv", "block 300", far_blocks),
    "a normalizer of 1,024 columns": Kind("score", "2x2003", narrow_normalizer),
    "a draft that is not compared": Kind("verify", "width 5", eager_drafts),
    "whole tiles of a vocabulary": Kind("linear", "1x1030x64", whole_tiles_of_columns),
    "ranks of 64": Kind("lora", "2x256", lora(lambda at, rank: at % rank < 64)),
    "softmax without a maximum": Kind("attention", "scores of 100,000", broken_where(
        lambda xp, _y, q, *_: widest_score(xp, q) > 4 * EXPONENT, nothing)),
    "mask of -10,000": Kind("attention", "scores of 100,000", broken_where(
        lambda xp, _y, q, *_: widest_score(xp, q) > 1e4)),
    "cap of 256 lanes": Kind("attention", "4/1x256", other_dim(256, cap=None)),
    "window of 256 lanes": Kind("attention", "4/1x256", other_dim(256, window=None)),
    "window of 128 lanes": Kind("attention", "4/2x128", other_dim(128, window=None)),
    "scale of 128 lanes": Kind("attention", "4/2x128", other_dim(128, scale=128**-0.5)),
    "64 heads": Kind("attention", "96/8x192", lost(1, 64)),
    "192 lanes": Kind("attention", "96/8x192", lost(2, 128)),
    "blocks of 8": Kind("attention", "blocks of 8", keys_of(8)),
    "1,024 queries": Kind("attention", "prompt 1100", lost(0, 1024)),
    "rows in 7 bits": Kind("attention", "rows 300", broken_where(
        lambda _xp, _y, _q, _cache, step: step.rows > 127)),
    "8,192 keys": Kind("attention", "context 9000", broken_where(
        lambda _xp, _y, _q, _cache, step: step.positions > 8191)),
    "64 heads of sinks": Kind("sink_attention", "96/8x192", lost(1, 64)),
    "long spans": Kind("span_attention", "span of 380", broken_where(
        lambda _xp, _y, _q, _cache, _step, spans: spans[:, 1] - spans[:, 0] > 256)),
    "256 tokens": Kind("full_attention", "500 tokens", lost(0, 256)),
    "1,024 writes": Kind("write_kv", "1100 rows", few_writes),
    "writes to blocks of 8": Kind("write_kv", "blocks of 8", cells_of(8)),
    "positions in 16 bits": Kind("rope_table", "llama3/64", other_args(
        lambda _xp, positions: (positions & 0xFFFF,))),
    "positions in 17 bits": Kind("rope_table", "linear/96", other_args(
        lambda _xp, positions: (positions & 0x1FFFF,))),
    "gain of YaRN": Kind("rope_table", "yarn/128", other_attrs(lambda _args, attrs: {
        **attrs, "scaling": attrs["scaling"]._replace(gain=1.0)})),
    "low and high": Kind("rope_table", "llama3/64", other_scaling(
        "llama3", low=1.0, high=4.0)),
    "context in training": Kind("rope_table", "llama3/64", other_scaling(
        "llama3", original=8192)),
    "lanes that stay": Kind("rope_table", "none/64", other_scaling(
        "none", rotary_dim=0)),
    "1,024 rotations": Kind("rope", "1100 rows", lost(0, 1024)),
    "squares in float16": Kind("rms_norm", "3x320/10000", broken_where(
        lambda xp, _y, x, _w: xp.abs(x).max(-1, keepdims=True) > 256, nothing)),
    "1,024 norms": Kind("rms_norm", "1100 rows", lost(0, 1024)),
    "1,024 rows with a mean": Kind("layer_norm", "1100 rows", lost(0, 1024)),
    "lengths below 1e-5": Kind("unit_rows", "1e-06", broken_where(
        lambda xp, _y, x: xp.abs(x).max(-1, keepdims=True) < 1e-5)),
    "1,024 products": Kind("linear", "1100 rows", lost(0, 1024)),
    "bias of many rows": Kind("linear", "1100 rows", lost_bias),
    "1,024 tokens": Kind("embedding", "1100 rows", lost(0, 1024)),
    "4,096 lanes": Kind("embedding", "3x40x5123", lost(1, 4096)),
    "1,024 gathered": Kind("take_rows", "1100 rows", lost(0, 1024)),
    "uniform of 0": Kind("sample", "uniforms 0 and 1", token_where(
        lambda bits: bits == 0, lambda _logits: 0)),
    "uniform next to 1": Kind("sample", "uniforms 0 and 1", token_where(
        lambda bits: bits >= 0x3F7FFFFF, lambda logits: logits.shape[1] - 1)),
    "ties of blocks": Kind("sample", "greedy/far ties", last_block_wins),
    "counts in 8 bits": Kind("sample", "many", other_tables(narrow_counts)),
    "256 samples": Kind("sample", "300 rows", lost(0, 256)),
    "one uniform of a row": Kind("sample", "2 samples of a row", first_uniform),
    "bias in 15 bits": Kind("sample", "sample_filtered/far ties",
                            other_tables(narrow_bias)),
    "1,024 candidates": Kind("sample", "many", params_where(
        1, lambda xp, p: xp.where((p > 1024) & (p < 60_000), 1024, p))),
    "top-p of many": Kind("sample", "many", params_where(
        2, lambda xp, p: xp.where(p < 1, 0.8, p))),
    "exponentials that overflow": Kind("score", "ties at 200", broken_where(
        lambda _xp, _y, logits, _t: logits.max(-1) > EXPONENT, nothing)),
    "ties of top tokens": Kind("score", "ties at 200", ties_of_scores),
    "1,024 scores": Kind("score", "1100 rows", lost(0, 1024)),
    "a whole last word": Kind("mask_logits", "2x4096", broken_where(
        lambda xp, y, *_: (xp.arange(y.shape[1]) >= 4064)[None], lambda y: 0 * y)),
    "two cache groups": Kind("make_step", "3 groups", two_groups),
    "1,024 positions": Kind("make_step", "3 groups", step_where("writes", writes_of)),
    "rows beyond 200": Kind("make_step", "300 rows", step_where("positions", rows_of)),
    "slots in 8 bits": Kind("make_step", "300 rows", step_where(
        "slots", lambda _xp, step: step.slots & 0xFF)),
    "adapters of no row": Kind("make_step", "3 groups", step_where(
        "adapters", lambda _xp, step: 0 * step.adapters)),
    "four admissions": Kind("admit", "16 admissions", lambda _xp, run: (
        lambda messages, tables: run(messages[:4], tables))),
    "tokens of 64 rows": Kind("prune_last_layer", "141 rows", step_where_of(
        "tokens", lambda xp, step: step.tokens * (xp.arange(len(step.tokens)) < 64))),
    "writes of one group": Kind("prune_last_layer", "141 rows", step_where_of(
        "writes", lambda xp, step: xp.broadcast_to(step.writes[:1],
                                                   step.writes.shape))),
    "adapters in 4 bits": Kind("admit", "2048 blocks", narrow_adapters),
    "256 verified rows": Kind("verify", "299 rows", lost(0, 512, -1)),
    "counts of 16 bits": Kind("verify", "vocabulary 70001", narrow_updates),
    "expansion of 16 bits": Kind("expand_rows", "vocabulary 70001", narrow_expansion),
    "exponentials of experts": Kind("route", "5x128x8/softmax_topk", lambda xp, run: (
        lambda logits, **attrs: (lambda ids, w: (ids, xp.where(
            logits.max(-1, keepdims=True) > EXPONENT, 0, w)))(*run(logits, **attrs)))),
    "ties of experts": Kind("route", "5x128x8/topk_softmax", ties_of_experts),
    "1,024 routed": Kind("route", "1100 rows", lost(0, 1024)),
    "128 grouped experts": Kind("group_route", "1x8x32", lambda _xp, run: (
        lambda *args, **attrs: first(run(*args, **attrs), lambda ids: ids & 127))),
    "128 columns of an expert": Kind("expert_linear", "33x4x3", lost(2, 128)),
    "last lanes of an expert": Kind("expert_linear", "33x4x3", lanes(64)),
    "an odd number of slots": Kind("expert_linear", "33x4x3", even_slots),
    "1,024 channels": Kind("causal_conv", "1030 channels", lost(1, 1024)),
    "short chunks": Kind("causal_conv", "1030 channels", state_of(
        lambda counts, fresh, taps: ~fresh & (counts > 1) & (counts < taps - 1),
        lambda old: 0 * old)),
    "short new sequences": Kind("causal_conv", "1030 channels", state_of(
        lambda counts, fresh, taps: fresh & (counts < taps - 1), lambda old: old)),
    "tiles of 64 tokens": Kind("causal_conv", "1030 channels",
                               broken_where(far_in_row(64))),
    "slots of 8 bits": Kind("causal_conv", "1030 channels", broken_where(
        lambda _xp, _y, _x, _t, step, _w: (step.slots > 255)[step.rows])),
    "chunks of 64 tokens": Kind("delta_rule", "32 heads", broken_where(far_in_row(64))),
    "16 heads": Kind("delta_rule", "32 heads", lost(1, 16)),
    "decay to zero": Kind("delta_rule", "32 heads", broken_where(
        lambda _xp, _y, _q, _k, _v, a, _b, _t, _step, w: (a + w.shift > 20)[..., None],
        nothing)),
    "matrices in slots": Kind("read_slots", "matrices", broken_where(
        lambda xp, y, *_: xp.full(len(y), y.ndim == 3))),
    "matrices to slots": Kind("write_slots", "matrices", broken_where(
        lambda xp, y, *_: xp.full(len(y), y.ndim == 3))),
    "32 adapters": Kind("lora", "33x12", lora(lambda at, rank: at // rank < 32)),
    "ranks of 8": Kind("lora", "33x12", lora(
        lambda at, rank: at % rank < max(rank - rank % 8, 1))),
    "4,096 adapted columns": Kind("lora", "2x4099x64", short_lora),
    "512 adapted rows": Kind("lora", "1100 rows", short_lora),
    "64 pooled": Kind("pool", "80 sequences", lost(0, 64)),
    "chunks of one group": Kind("chunk_rows", "2 groups", first_group_only),
    "cubes that overflow": Kind("gated_activation", "edges/gelu_tanh", broken_where(
        lambda xp, _y, gate, _up: xp.abs(gate) > 1e4, nothing)),
    "1,024 activations": Kind("gated_activation", "1100 rows", lost(0, 1024)),
    "a product with 1 / floor": Kind("temper_queries", "floor 41", reciprocal),
}  # fmt: skip
"""Name -> wrong kernel."""
