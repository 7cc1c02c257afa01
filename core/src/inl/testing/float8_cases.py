"""Cases of ops on a cache in float8_e4m3, for backends that offer one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import rounded_e4m3
from inl.spec.cache import Cache
from inl.spec.op import Case

if TYPE_CHECKING:
    from inl.spec.op import OpSpec

Rng = np.random.Generator

OPS = ("write_kv", "attention", "sink_attention", "attend")
"""Ops whose written keys are rounded once, so that every correct kernel stores the
same numbers. A rotation before it may round a key to either neighbor."""

SCALES = (0.5, 2.0)
"""Of keys and values: powers of two, so that contents can be written exactly."""


def float8_cases(op: OpSpec, cases: Sequence[Case], rng: Rng) -> Iterator[Case]:
    """Yield ``cases`` with a cache in float8, and a write of extreme numbers."""
    if op.name not in OPS:
        return
    for case in cases:
        yield with_float8(case)
    if op.name == "write_kv":
        yield _extreme_write(cases[-1], rng)


def with_float8(case: Case, scales: tuple[float, float] = SCALES) -> Case:
    """Return a case whose cache has ``scales`` and its numbers rounded to float8."""

    def change(arg: Any) -> Any:
        return float8_cache(arg, scales) if isinstance(arg, Cache) else arg

    args = tuple(map(change, case.args))
    return replace(case, name=f"{case.name}/float8", args=args)


def float8_cache(cache: Cache, scales: tuple[float, float] = SCALES) -> Cache:
    """Return a cache of numbers in float8 that are near those of ``cache``."""
    k, v = (
        rounded_e4m3(x / scale)
        for x, scale in zip((cache.k, cache.v), scales, strict=True)
    )
    return Cache(k, v, np.array(scales, np.float32))


def _extreme_write(case: Case, rng: Rng) -> Case:
    """Return a write of numbers above the largest, of subnormals and of NaN.

    The scales are none of the values' dtype; the cache is empty, so it needs no exact
    products with them.
    """
    k, v, cache, writes = case.args
    empty = cache._replace(k=np.zeros_like(cache.k), v=np.zeros_like(cache.v))
    sizes = 2.0 ** rng.integers(-12, 12, (2, *k.shape))
    k, v = k * sizes[0], v * sizes[1]
    k[0, 0, 0] = v[0, 0, 1] = np.nan
    extreme = replace(case, name=f"{case.name}/extreme", args=(k, v, empty, writes))
    return with_float8(extreme, (0.37, 1.9))
