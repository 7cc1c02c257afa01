"""Cases of long sums: a result whose sums are in bfloat16 is not accepted."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from inl.dtypes import rounded
from inl.ops import catalog
from inl.spec.op import Case
from inl.spec.tolerance import judge, storage_run, stored
from inl.testing.long_sums import LONG_SUMS, TERMS

HALF = "bfloat16"


def half_sum(terms):
    """The sum along the first axis, rounded after each addition."""
    return reduce(lambda total, x: rounded(total + x, HALF), np.float32(terms))


def pool(x, _starts, **_):
    return half_sum(x)[None] / TERMS


def layer_norm(x, w, *, eps):
    centered = x - half_sum(x.T)[:, None] / TERMS
    deviation = np.sqrt(np.square(centered).mean(-1, keepdims=True) + eps)
    return centered / deviation * w.weight


def attention(q, cache, step, *_, **__):
    """Queries are zero: each key has the same weight."""
    cells = cache.v[step.blocks[0, 0]].reshape(-1, cache.v.shape[-1])[:TERMS]
    return np.broadcast_to(half_sum(rounded(cells / TERMS, HALF)), q.shape)


@pytest.mark.parametrize("run", [pool, layer_norm, attention])
def test_sums_in_bfloat16_are_found(run):
    name = run.__name__
    spec = catalog()[name]
    args, attrs = LONG_SUMS[name](np.random.default_rng(3))
    case = Case("sum", args, attrs)
    right = storage_run(spec, case, HALF)
    assert judge(spec, case, HALF, right).passed
    wrong = rounded(np.array(run(*stored(case, HALF, np.float32), **attrs)), HALF)
    assert not judge(spec, case, HALF, wrong).passed
