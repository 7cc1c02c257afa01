"""Writing keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from inl.spec.cache import Cache
from inl.spec.op import Case, op
from inl.spec.step import Array


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, kv_heads, dim in ((1, 1, 2), (7, 3, 64)):
        k, v = rng.standard_normal((2, tokens, kv_heads, dim))
        cache = Cache(*rng.standard_normal((2, 5, 4, kv_heads, dim)))
        cells = rng.permutation(np.arange(4, 20))[:tokens].astype(np.int32)
        yield Case(f"{tokens}x{kv_heads}x{dim}", (k, v, cache, cells))


@op(
    shapes=lambda k, v, cache, writes: cache,  # noqa: ARG005
    cases=_cases,
    consumes=("cache",),
)
def write_kv(k: Array, v: Array, cache: Cache, writes: Array) -> Cache:
    """Put k, v [T, kv_heads, d] into cells ``writes`` [T] of the cache."""
    size = cache.k.shape[1]
    fresh = Cache(cache.k.copy(), cache.v.copy())
    fresh.k[writes // size, writes % size] = k
    fresh.v[writes // size, writes % size] = v
    return fresh
