"""Writes to the paged key-value cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from inl.dtypes import rounded_e4m3
from inl.spec.cache import Cache, kv_token_bytes
from inl.spec.op import Case, nbytes, op
from inl.spec.step import Array


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, kv_heads, dim in ((1, 1, 2), (7, 3, 64)):
        k, v = rng.standard_normal((2, tokens, kv_heads, dim))
        cache = Cache(*rng.standard_normal((2, 5, 4, kv_heads, dim)))
        positions = rng.permutation(np.arange(4, 20))[:tokens].astype(np.int32)
        yield Case(f"{tokens}x{kv_heads}x{dim}", (k, v, cache, positions))


def _traffic(cache: Any, k: Any, v: Any, _cache: Any, writes: Any) -> int:
    tokens, kv_heads, dim = k.shape
    stored = tokens * kv_token_bytes(kv_heads, dim, str(cache.k.dtype))
    return int(nbytes((k, v, writes)) + stored)


@op(
    shapes=lambda k, v, cache, writes: cache,  # noqa: ARG005
    cases=_cases,
    traffic=_traffic,
    consumes=("cache",),
)
def write_kv(k: Array, v: Array, cache: Cache, writes: Array) -> Cache:
    """Write keys and values to the cache.

    k, v: [T, kv_heads, d]. writes: int32 [T] cache positions, each
    ``block * block_size + offset``. A cache with scales stores keys and values divided
    by them, rounded to float8_e4m3: ties to even, magnitudes to 448 at most. Returns
    the cache.
    """
    size = cache.k.shape[1]
    if cache.scales is not None:
        k, v = (
            rounded_e4m3(x / scale.astype(x.dtype))
            for x, scale in zip((k, v), cache.scales, strict=True)
        )
    updated = cache._replace(k=cache.k.copy(), v=cache.v.copy())
    updated.k[writes // size, writes % size] = k
    updated.v[writes // size, writes % size] = v
    return updated
