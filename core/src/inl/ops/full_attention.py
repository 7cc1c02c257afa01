"""Attention within whole sequences, in both directions, without a cache.

For encoders (Devlin et al., 2019). The sequences of a batch are concatenated, with
their bounds in ``starts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Spec, elements, op
from inl.spec.step import Array

SHAPES: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("one", (1,), 0),
    ("several", (5, 1, 9), 0),
    ("padded", (3, 0, 6), 4),
    ("130 tokens", (130, 2), 0),
)
"""(name, tokens of each sequence, padding tokens) of the cases."""


class DistanceBias(NamedTuple):
    """Parameters of :data:`biased_attention`."""

    weight: Array
    """[2 D + 1, heads]: added to the scores of keys at distances -D .. D from their
    query; keys that are farther away have that of the farthest."""


def starts_of(lengths: Sequence[int]) -> Any:
    """Return the cumulative lengths of sequences, int32 [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _arrays(rng: np.random.Generator, name: str, dims: tuple[int, int, int]) -> Any:
    _, lengths, padding = next(shape for shape in SHAPES if shape[0] == name)
    heads, kv_heads, dim = dims
    tokens = sum(lengths) + padding
    q = rng.standard_normal((tokens, heads, dim))
    k, v = rng.standard_normal((2, tokens, kv_heads, dim))
    return q, k, v, starts_of(lengths)


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, *_ in SHAPES:
        args = _arrays(rng, name, (4, 4, 16))
        yield Case(name, args, {"scale": 0.25, "window": None})
    args = _arrays(rng, "several", (6, 2, 8))
    yield Case("grouped heads", args, {"scale": 0.3, "window": None})
    args = _arrays(rng, "130 tokens", (3, 3, 8))
    yield Case("window", args, {"scale": 0.3, "window": 7})


def _biased_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, *_ in SHAPES:
        w = DistanceBias(2 * rng.standard_normal((13, 4)))
        args = (*_arrays(rng, name, (4, 4, 16)), w)
        yield Case(name, args, {"scale": 0.25})


def _flops(q: Any, *_: Any, **__: Any) -> int:
    """Two products for each pair of tokens, as if they were one sequence."""
    return 4 * elements(q) * int(q.shape[0])


@op(
    shapes=lambda q, k, v, starts, **_: Spec(q.shape, q.dtype),  # noqa: ARG005
    cases=_cases,
    flops=_flops,
    since=(2, 0),
    used_by="encoders",
)
def full_attention(
    q: Array, k: Array, v: Array, starts: Array, *, scale: float, window: int | None
) -> Array:
    """Attention of ``q`` [T, heads, d] to all keys of its sequence.

    k, v: [T, kv_heads, d]. starts: int32 [N + 1], sequence n has the tokens
    starts[n] .. starts[n + 1] - 1, and may have none. Each group of
    ``heads / kv_heads`` query heads shares a key head. With a window, a query attends
    to keys at most ``window`` tokens before and after it. Tokens of no sequence give
    zeros. Softmax in float32 or wider. Returns [T, heads, d].
    """
    return attend_sequences(q, k, v, starts, scale, window, None)


@op(
    shapes=lambda q, k, v, starts, w, **_: Spec(q.shape, q.dtype),  # noqa: ARG005
    cases=_biased_cases,
    weights=DistanceBias,
    flops=_flops,
    since=(2, 0),
    used_by="encoders",
)
def biased_attention(
    q: Array, k: Array, v: Array, starts: Array, w: DistanceBias, *, scale: float
) -> Array:
    """:data:`full_attention` with a bias of each head by the distance of key and query.

    The score of a key at position j to a query at position i is
    ``scale * q k + w.weight[clip(j - i, -D, D) + D]``. Other arguments as there.
    """
    return attend_sequences(q, k, v, starts, scale, None, w.weight)


def attend_sequences(
    q: Any, k: Any, v: Any, starts: Any, scale: float, window: int | None, bias: Any
) -> Any:
    """Return the result of both ops; bias: [2 D + 1, heads], or ``None``."""
    out = np.zeros_like(q)
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    bounds = starts.tolist()
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        queries = q[start:stop].reshape(-1, kv_heads, heads // kv_heads, dim)
        keys = k[start:stop].transpose(1, 2, 0)[:, None]
        scores = queries.transpose(1, 2, 0, 3) @ keys * scale
        index = np.arange(stop - start)
        distance = index - index[:, None]
        if bias is not None:
            most = len(bias) // 2
            added = bias[np.clip(distance, -most, most) + most].transpose(2, 0, 1)
            scores = scores + added.reshape(scores.shape)
        if window is not None:
            seen = np.abs(distance) <= window
            scores = np.where(seen, scores, np.finfo(scores.dtype).min)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        result = weights @ v[start:stop].transpose(1, 0, 2)[:, None]
        out[start:stop] = result.transpose(2, 0, 1, 3).reshape(-1, heads, dim)
    return out
