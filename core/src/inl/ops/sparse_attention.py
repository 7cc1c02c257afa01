"""Sparse attention by an indexer (DeepSeek-AI, 2025): chosen tokens of a cache.

The cache's values are latents, which are keys and values of attention at once; its keys
are those of the indexer, which chooses the tokens that attention reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from inl.errors import RequestError
from inl.ops.attention import SHAPES, random_step
from inl.ops.moe import best
from inl.spec.cache import Cache
from inl.spec.op import Case, Spec, elements, nbytes, op
from inl.spec.step import Array, Step

USED_BY: Final = "models with sparse attention"
CHOICES: Final = ((4, 3, 8, 16), (32, 2, 16, 16))
"""(k, heads, lanes of an index key, lanes of the cache) of the cases."""
LARGE_SHAPES: Final[tuple[tuple[str, list[int], list[int], dict[str, int]], ...]] = (
    ("context 300", [299, 37], [1, 3], {}),
)
"""Shapes as those of attention, with contexts of many blocks."""


def _index_shapes(
    q: Spec, _weights: Any, _cache: Any, _step: Any, *, k: int, group: int
) -> Spec:
    _refuse_count(k)
    assert group >= 0
    return Spec((q.shape[0], k), "int32")


def _refuse_count(k: int) -> None:
    if k < 1:
        raise RequestError(f"index_topk: k: found {k}, accepted: 1 or more")


def _index_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Small integers, whose scores every dtype and order of sums computes exactly.

    No score that is chosen equals one that is not.
    """
    for name, cached, counts, pads in (*SHAPES, *LARGE_SHAPES):
        for k, heads, lanes, dim in CHOICES:
            step, blocks = random_step(rng, cached, counts, **pads)
            tokens = step.tokens.shape[0]
            cells = rng.integers(-3, 4, (2, blocks, 4, 1, dim)).astype(np.float64)
            cache = Cache(*cells)
            q = rng.integers(-3, 4, (tokens, heads, lanes)).astype(np.float64)
            weights = rng.integers(-8, 9, (tokens, heads)) / 4
            for at in range(int(step.used_counts[2])):
                while not _is_decided(q[at], weights[at], cache, step, at, k):
                    q[at] = rng.integers(-3, 4, (heads, lanes))
                    weights[at] = rng.integers(-8, 9, heads) / 4
            attrs = {"k": k, "group": 0}
            yield Case(
                f"{name}/{k} of {heads}x{lanes}", (q, weights, cache, step), attrs
            )


def _is_decided(q: Any, weights: Any, cache: Any, step: Any, at: int, k: int) -> bool:
    scores = np.sort(_scores(q, weights, cache.k, step, at, 0))[::-1]
    return len(scores) <= k or bool(scores[k - 1] > scores[k])


def _scores(q: Any, weights: Any, keys: Any, step: Any, at: int, group: int) -> Any:
    """Return the scores of the tokens that token ``at`` of a step may attend to."""
    size, count = keys.shape[1], int(step.positions[at]) + 1
    ids = step.blocks[group, step.rows[at], : -(-count // size)]
    seen = keys[ids, :, 0, : q.shape[-1]].reshape(-1, q.shape[-1])[:count]
    return weights @ np.maximum(q @ seen.T, 0)


def _context(cache: Any, step: Any) -> int:
    return int(step.blocks.shape[-1] * cache.k.shape[1])


def _index_flops(q: Any, _weights: Any, cache: Any, step: Any, **_: Any) -> int:
    return 2 * int(elements(q) + q.shape[0] * q.shape[1]) * _context(cache, step)


def _index_traffic(
    ids: Any, q: Any, weights: Any, cache: Any, step: Any, **_: Any
) -> int:
    keys = step.blocks.shape[1] * _context(cache, step)
    read = Spec((keys, q.shape[-1]), str(cache.k.dtype))
    return nbytes((ids, q, weights, read))


@op(
    shapes=_index_shapes,
    cases=_index_cases,
    flops=_index_flops,
    traffic=_index_traffic,
    rounds=False,
    since=(2, 1),
    used_by=USED_BY,
)
def index_topk(
    q: Array, weights: Array, cache: Cache, step: Step, *, k: int, group: int
) -> Array:
    """Choose the ``k`` cached tokens with the highest scores, for each token.

    q: [T, heads, d]; weights: [T, heads]. The score of a cached token is the sum over
    heads of ``weights * relu(q . key)``, in float32 or wider; key: the first d lanes of
    the cache's one key head. A token at position p chooses from positions 0 .. p.
    ``group`` selects the cache group's block table. Returns positions int32 [T, k] in
    ascending order, and -1 after the last where fewer are seen; any of several tokens
    with the same score. Padding tokens have -1 only. Raises
    :class:`~inl.errors.RequestError` for a ``k`` below 1.
    """
    _refuse_count(k)
    scale = 1 if cache.scales is None else float(cache.scales[0])
    ids = np.full((q.shape[0], k), -1, np.int32)
    for at in range(int(step.used_counts[2])):
        scores = scale * _scores(q[at], weights[at], cache.k, step, at, group)
        chosen = np.sort(best(scores[None], k)[0])
        ids[at, : len(chosen)] = chosen
    return ids


def _sparse_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, cached, counts, pads in (*SHAPES, *LARGE_SHAPES):
        for k, heads, dim in ((4, 3, 16), (32, 2, 24)):
            step, blocks = random_step(rng, cached, counts, **pads)
            tokens = step.tokens.shape[0]
            cache = Cache(*rng.standard_normal((2, blocks, 4, 1, dim)))
            ids = np.full((tokens, k), -1, np.int32)
            for at in range(int(step.used_counts[2])):
                seen = int(step.positions[at]) + 1
                count = min(k, seen)
                ids[at, :count] = np.sort(rng.permutation(seen)[:count])
            q = rng.standard_normal((tokens, heads, dim))
            attrs = {"scale": dim**-0.5, "group": 0}
            yield Case(f"{name}/{k} of {heads}x{dim}", (q, ids, cache, step), attrs)


def _sparse_traffic(
    out: Any, q: Any, ids: Any, cache: Any, _step: Any, **_: Any
) -> int:
    read = Spec((elements(ids), q.shape[-1]), str(cache.v.dtype))
    return nbytes((out, q, ids, read))


@op(
    shapes=lambda q, ids, cache, step, **_: Spec(q.shape, q.dtype),  # noqa: ARG005
    cases=_sparse_cases,
    flops=lambda q, ids, *_, **__: 4 * elements(q) * int(ids.shape[1]),
    traffic=_sparse_traffic,
    since=(2, 1),
    used_by=USED_BY,
)
def sparse_attention(
    q: Array, ids: Array, cache: Cache, step: Step, *, scale: float, group: int
) -> Array:
    """Attention of ``q`` [T, heads, d] over chosen tokens of its row.

    ids: int32 [T, K] positions of the row that :data:`index_topk` returned; -1 is none.
    All heads share the cache's one head; keys and values are both the cache's values,
    [d]. ``group`` selects the cache group's block table. Padding tokens and tokens
    without ids give zeros. Softmax in float32 or wider. Returns [T, heads, d].
    """
    size, out = cache.v.shape[1], np.zeros_like(q)
    scale_v = 1 if cache.scales is None else cache.scales[1].astype(q.dtype)
    for at in range(int(step.used_counts[2])):
        chosen = ids[at][ids[at] >= 0]
        if not len(chosen):
            continue
        blocks = step.blocks[group, step.rows[at]][chosen // size]
        latents = cache.v[blocks, chosen % size, 0] * scale_v
        scores = q[at] @ latents.T * scale
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out[at] = shares / shares.sum(-1, keepdims=True) @ latents
    return out
