"""Sparse attention on torch: shapes without sizes, and cells that nothing wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.ops import catalog
from inl.spec.tolerance import judge
from inl_torch.eager import sparse_attention

TOPK, ATTEND = catalog()["index_topk"], catalog()["sparse_attention"]


@pytest.mark.parametrize("way", ["exact", "static"])
@pytest.mark.parametrize("parts", [1 << 25, 40])
def test_both_ways_choose_alike(way, parts, seed, on_torch, on_host, monkeypatch):
    """parts: numbers of a part of the tokens."""
    monkeypatch.setattr(sparse_attention, "MOST", parts)
    run = getattr(sparse_attention, f"{way}_topk")
    for case in TOPK.cases(np.random.default_rng(seed)):
        q, weights, cache, step = on_torch(TOPK, case, "float32")
        found = on_host(run(q, weights, cache, step, **case.attrs))
        verdict = judge(TOPK, case, "float32", found)
        assert verdict.passed, f"{case.name}, seed {seed}: {verdict}"


def test_cells_that_are_not_chosen_have_no_effect(seed, on_torch, on_host):
    for case in ATTEND.cases(np.random.default_rng(seed)):
        q, ids, cache, step = on_torch(ATTEND, case, "float32")
        values = cache.v.clone()
        size, used = values.shape[1], int(step.used_counts[2])
        read = torch.zeros(values.shape[:2], dtype=torch.bool)
        for at in range(used):
            places = ids[at][ids[at] >= 0].long()
            read[
                step.blocks[0, step.rows[at]].long()[places // size], places % size
            ] = True
        values[~read] = torch.nan
        cache = cache._replace(v=values)
        found = sparse_attention.sparse_attention(q, ids, cache, step, **case.attrs)
        verdict = judge(ATTEND, case, "float32", on_host(found))
        assert verdict.passed, f"{case.name}, seed {seed}: {verdict}"
