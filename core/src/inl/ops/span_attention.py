"""Causal attention in which spans of tokens attend to themselves in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from inl.ops.attention import (
    attention_flops,
    attention_traffic,
    random_step,
    softmax_over_cache,
)
from inl.spec.cache import Cache
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array, Step

SHAPES: tuple[
    tuple[str, list[int], list[int], dict[str, int], list[tuple[int, int, int]]], ...
] = (
    ("prompt", [0], [9], {}, [(0, 2, 7)]),
    ("none", [3, 0], [1, 4], {}, []),
    ("two spans", [0], [14], {}, [(0, 1, 5), (0, 5, 12)]),
    ("mixed", [5, 6, 0], [1, 5, 8], {}, [(1, 7, 10), (2, 0, 8)]),
    ("padded", [3, 8], [1, 6], {"pad_rows": 2, "pad_tokens": 3}, [(1, 9, 13)]),
    ("long", [7], [150], {}, [(0, 20, 140)]),
)
"""(name, cached tokens per row, new tokens per row, padding, spans: row, first and end
position) of the cases."""


def token_spans(step: Step, spans: Sequence[tuple[int, int, int]]) -> Any:
    """Return int32 [T, 2] for spans (row, first position, end)."""
    out = np.zeros((step.tokens.shape[0], 2), np.int32)
    used = np.arange(len(out)) < step.used_counts[2]
    for row, first, end in spans:
        own = (step.rows == row) & (step.positions >= first) & (step.positions < end)
        out[used & own] = first, end
    return out


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, cached, counts, pads, spans in SHAPES:
        for window, cap, dims in (
            (None, None, (6, 2, 16)), (3, None, (4, 4, 8)), (None, 2.0, (4, 1, 8)),
        ):  # fmt: skip
            heads, kv_heads, dim = dims
            step, blocks = random_step(rng, cached, counts, **pads)
            q = rng.standard_normal((step.tokens.shape[0], heads, dim))
            cache = Cache(*rng.standard_normal((2, blocks, 4, kv_heads, dim)))
            attrs = {"scale": dim**-0.5, "window": window, "cap": cap, "group": 0}
            label = name + ("/window" if window else "") + ("/cap" if cap else "")
            yield Case(label, (q, cache, step, token_spans(step, spans)), attrs)


@op(
    shapes=lambda q, cache, step, spans, **_: Spec(q.shape, q.dtype),  # noqa: ARG005
    cases=_cases,
    flops=lambda q, cache, step, _spans, **attrs: attention_flops(
        q, cache, step, **attrs
    ),
    traffic=lambda out, q, cache, step, _spans, **attrs: attention_traffic(
        out, q, cache, step, **attrs
    ),
    since=(2, 0),
    used_by="models of images",
)
def span_attention(
    q: Array,
    cache: Cache,
    step: Step,
    spans: Array,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Array:
    """:data:`~inl.ops.attention.attention` in which spans see themselves wholly.

    spans: int32 [T, 2], first position and end of the token's span in its sequence;
    zeros for a token of none. A token attends to later keys of its span too; with a
    window only to keys after position - window, of its span as well. All tokens of a
    span are computed in this step. Other arguments as there.
    """
    return softmax_over_cache(q, cache, step, scale, window, cap, group, None, spans)
