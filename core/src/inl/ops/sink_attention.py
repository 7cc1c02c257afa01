"""Attention with sinks: logits that take part in the softmax (Xiao et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from inl.ops.attention import (
    SHAPES,
    attention_case,
    attention_flops,
    attention_traffic,
    softmax_over_cache,
)
from inl.spec.cache import Cache
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array, Step


class Sinks(NamedTuple):
    """Parameters of :data:`sink_attention`."""

    logits: Array
    """[heads]."""


def _sink_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, *_ in SHAPES:
        for attrs in ({}, {"window": 3}):
            case = attention_case(rng, name, (6, 2, 16), attrs)
            sinks = Sinks(2 * rng.standard_normal(6))
            given = {key: one for key, one in case.attrs.items() if key != "cap"}
            yield Case(case.name, (*case.args, sinks), given)
    args = (*case.args, Sinks(np.array([-1e4, -30, 0, 30, 1e4, 1])))
    yield Case("extreme sinks", args, given)


@op(
    shapes=lambda q, cache, step, w, **_: Spec(q.shape, q.dtype),  # noqa: ARG005
    cases=_sink_cases,
    weights=Sinks,
    flops=lambda q, cache, step, _w, **attrs: attention_flops(q, cache, step, **attrs),
    traffic=lambda out, q, cache, step, _w, **attrs: attention_traffic(
        out, q, cache, step, **attrs
    ),
    since=(1, 2),
)
def sink_attention(
    q: Array,
    cache: Cache,
    step: Step,
    w: Sinks,
    *,
    scale: float,
    window: int | None,
    group: int,
) -> Array:
    """:data:`attention` with a logit per head that takes part in the softmax.

    A query head attends to its keys with the weights
    ``exp(score) / (exp(w.logits[head]) + sum(exp(scores)))`` (Xiao et al., 2024). q:
    [T, heads, d]. Other arguments as in :data:`attention`. Returns [T, heads, d].
    """
    return softmax_over_cache(q, cache, step, scale, window, None, group, w.logits)
