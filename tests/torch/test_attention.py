"""Paged attention against dense attention by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from inl.ops.attention import random_step
from inl.spec.cache import Cache
from inl_torch.eager import attention

BLOCK = 4
PLANS = {"exact": attention.exact_plan, "static": attention.static_plan}


def random_problem(rng):
    rows = int(rng.integers(1, 6))
    decoding = int(rng.integers(0, rows + 1))
    counts = [1] * decoding + [int(n) for n in rng.integers(1, 9, rows - decoding)]
    cached = [int(n) for n in rng.integers(0, 14, rows)]
    pads = {"pad_rows": int(rng.integers(0, 3)), "pad_tokens": int(rng.integers(0, 5))}
    return cached, counts, pads


def dense_attention(q, k, v, cached, *, scale, window):
    """One row: q [t, heads, d] over k, v [length, kv_heads, d], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    place = torch.arange(cached, cached + q.shape[0])[:, None]
    key = torch.arange(k.shape[1])[None]
    seen = key <= place
    if window is not None:
        seen &= key > place - window
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen[None], scale=scale
    )
    return out[0].transpose(0, 1)


def paged(rows, step, blocks, kv_heads, dim, filler):
    """Scatter each row's keys into a cache filled with ``filler``."""
    cache = torch.full((blocks, BLOCK, kv_heads, dim), filler)
    for row, values in enumerate(rows):
        for place, value in enumerate(values):
            block = int(step.blocks[0, row, place // BLOCK])
            cache[block, place % BLOCK] = value
    return cache


@pytest.mark.parametrize("form", sorted(PLANS))
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_paged_attention_equals_dense_attention(heads, kv_heads, window, form, seed):
    rng = np.random.default_rng(seed)
    for _ in range(8):
        cached, counts, pads = random_problem(rng)
        step, blocks = random_step(rng, cached, counts, block_size=BLOCK, **pads)
        tensors = (torch.from_numpy(np.array(x)) for x in step[:-1])
        step = step._replace(**dict(zip(step._fields[:-1], tensors, strict=True)))
        plan = PLANS[form](step, block_size=BLOCK)
        step = step._replace(plan={attention.LABEL: plan})
        torch.manual_seed(seed)
        dim, scale = 16, 0.3
        lengths = [old + new for old, new in zip(cached, counts, strict=True)]
        keys = [torch.randn(n, kv_heads, dim) for n in lengths]
        values = [torch.randn(n, kv_heads, dim) for n in lengths]
        q = torch.randn(step.tokens.shape[0], heads, dim)
        # Other cache slots are finite, as in a shared cache.
        cache = Cache(
            paged(keys, step, blocks, kv_heads, dim, 1e4),
            paged(values, step, blocks, kv_heads, dim, 1e4),
        )
        out = attention.attention(
            q, cache, step, scale=scale, window=window, cap=None, group=0
        )
        start = 0
        for row, count in enumerate(counts):
            mine = q[start : start + count].double()
            want = dense_attention(
                mine,
                keys[row].double(),
                values[row].double(),
                cached[row],
                scale=scale,
                window=window,
            )
            got = out[start : start + count].double()
            where = f"row {row} of {cached} + {counts}, {pads}, seed {seed}"
            assert (got - want).abs().max() < 1e-5, where
            start += count
        assert not out[start:].any(), f"padding, seed {seed}"


@pytest.mark.parametrize("form", sorted(PLANS))
def test_a_padding_only_step_gives_zeros(form):
    step, blocks = random_step(np.random.default_rng(0), [0], [1], pad_rows=2)
    tensors = (torch.from_numpy(np.array(x) * 0) for x in step[:-1])
    step = step._replace(**dict(zip(step._fields[:-1], tensors, strict=True)))
    plan = PLANS[form](step, block_size=BLOCK)
    step = step._replace(plan={attention.LABEL: plan})
    cache = Cache(*torch.ones(2, blocks, BLOCK, 1, 4))
    out = attention.attention(
        torch.ones(step.tokens.shape[0], 2, 4),
        cache,
        step,
        scale=1.0,
        window=None,
        cap=None,
        group=0,
    )
    assert out.shape[0] == step.tokens.shape[0]
    assert not out.any()
