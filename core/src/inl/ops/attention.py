"""Causal attention over a paged key-value cache.

Vaswani et al., 2017; Kwon et al., 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops.step import empty_tables, make_step
from inl.spec.cache import Cache, kv_token_bytes
from inl.spec.message import Row, step_frame
from inl.spec.op import Case, Spec, elements, nbytes, op
from inl.spec.step import Array, Bucket, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


def random_step(
    rng: np.random.Generator,
    cached: Sequence[int],
    counts: Sequence[int],
    *,
    block_size: int = 4,
    pad_rows: int = 0,
    pad_tokens: int = 0,
) -> tuple[Step, int]:
    """Return a step for tests, and the number of blocks that its cache needs.

    Each row has ``cached`` tokens and adds ``counts`` more; its blocks are scattered.
    """
    lengths = [old + new for old, new in zip(cached, counts, strict=True)]
    width = max(-(-length // block_size) for length in lengths) + 1
    tables = empty_tables(groups=1, slots=len(counts) + 1, max_blocks_per_seq=width)
    free = list(rng.permutation(np.arange(1, 2 + width * len(counts))))
    for slot, length in enumerate(lengths, start=1):
        for index in range(-(-length // block_size)):
            tables.blocks[0, slot, index] = free.pop()
    tables.lengths[1:] = cached
    bucket = Bucket(tokens=sum(counts) + pad_tokens, rows=len(counts) + pad_rows)
    rows = [Row(slot, [0] * new) for slot, new in enumerate(counts, start=1)]
    message = step_frame(
        bucket,
        rows,
        step=0,
        groups=1,
        block_size=block_size,
        decode_rows=sum(1 for new in counts if new == 1),
    )
    step, _ = make_step.body(message, tables, bucket=bucket, block_size=block_size)
    return step, 2 + width * len(counts)


SHAPES: tuple[tuple[str, list[int], list[int], dict[str, Any]], ...] = (
    ("decode", [5, 0, 11, 15], [1, 1, 1, 1], {}),
    ("prefill", [0], [9], {}),
    ("chunk", [6], [5], {}),
    ("mixed", [3, 8, 0, 4], [1, 1, 7, 3], {}),
    ("padded", [3, 8], [1, 6], {"pad_rows": 3, "pad_tokens": 4}),
)
"""(name, cached tokens per row, new tokens per row, padding) of the cases."""

LARGE_SHAPES: tuple[tuple[str, list[int], list[int], dict[str, Any]], ...] = (
    ("context 121", [120, 37], [1, 1], {}),
    ("context 1030", [1029], [1], {}),
    ("chunk at 1000", [1000, 120], [20, 1], {}),
    ("prompt 130", [0], [130], {}),
    ("rows 70", [2, 9] * 35, [1] * 70, {}),
    ("contexts 16 to 256", [15, 31, 63, 127, 255], [1] * 5, {}),
    ("prompts 64", [0, 64], [64, 64], {}),
)
"""Shapes with long contexts, many tokens or many rows, as :data:`SHAPES`."""

FULL_SHAPES: tuple[tuple[str, list[int], list[int], dict[str, Any]], ...] = (
    ("context 4100", [4099, 2047], [1, 1], {}),
    ("prompt 600 after 300", [300], [600], {}),
    ("rows 300", [5, 70, 0] * 100, [1, 1, 2] * 100, {}),
)
"""Shapes that only a full check tests."""


def attention_case(
    rng: np.random.Generator,
    name: str,
    dims: tuple[int, int, int],
    attrs: dict[str, Any],
) -> Case:
    """Return the case with shape ``name``; dims: (heads, kv_heads, head_dim)."""
    shapes = (*SHAPES, *LARGE_SHAPES, *FULL_SHAPES)
    _, cached, counts, pads = next(shape for shape in shapes if shape[0] == name)
    heads, kv_heads, dim = dims
    step, blocks = random_step(rng, cached, counts, **pads)
    q = rng.standard_normal((step.tokens.shape[0], heads, dim))
    cache = Cache(*rng.standard_normal((2, blocks, 4, kv_heads, dim)))
    values = {"scale": dim**-0.5, "window": None, "cap": None, "group": 0, **attrs}
    label = f"{name}/{heads}/{kv_heads}x{dim}" + "".join(f"/{a}" for a in attrs)
    return Case(label, (q, cache, step), values)


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, *_ in SHAPES:
        yield attention_case(rng, name, (6, 2, 64), {})
    yield attention_case(rng, "mixed", (9, 3, 64), {})
    yield attention_case(rng, "mixed", (4, 4, 128), {})
    yield attention_case(rng, "mixed", (4, 1, 8), {"window": 3})
    yield attention_case(rng, "mixed", (4, 2, 8), {"cap": 2.0})


def attention_flops(
    q: Any, cache: Any, step: Any, *, window: int | None = None, **_: Any
) -> int:
    """Two products per query and key; every row has the longest context that fits."""
    context = step.blocks.shape[-1] * cache.k.shape[1]
    keys = context if window is None else min(context, window)
    return 4 * elements(q) * int(keys)


def cached_bytes(cache: Any, step: Any, window: int | None) -> int:
    """Bytes of keys and values that a step reads, every row at the longest context.

    With a window, a row of n tokens reads the last ``window + n - 1`` keys.
    """
    rows, blocks = step.blocks.shape[1:]
    _, size, kv_heads, dim = cache.k.shape
    keys = blocks * size
    if window is not None:
        keys = min(keys, window + -(-step.tokens.shape[0] // rows) - 1)
    return int(rows * keys * kv_token_bytes(kv_heads, dim, str(cache.k.dtype)))


def attention_traffic(
    out: Any, q: Any, cache: Any, step: Any, *, window: int | None, **_: Any
) -> int:
    return nbytes((q, out)) + cached_bytes(cache, step, window)


@op(
    shapes=lambda q, cache, step, **_: Spec(q.shape, q.dtype),  # noqa: ARG005
    cases=_cases,
    flops=attention_flops,
    traffic=attention_traffic,
)
def attention(
    q: Array,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Array:
    """Causal attention of ``q`` [T, heads, d] over the cached keys of its row.

    A query at position p attends to positions 0 .. p, or p - window + 1 .. p.
    ``cap`` limits scores to ``cap * tanh(score / cap)``. Each group of
    ``heads / kv_heads`` query heads shares a key head. ``group`` selects the cache
    group's block table. Keys and values of a cache with scales are its numbers times
    these. Padding tokens and rows of length 0 give zeros. Softmax in
    float32 or wider. Returns [T, heads, d].
    """
    return softmax_over_cache(q, cache, step, scale, window, cap, group, None)


def softmax_over_cache(
    q: Any,
    cache: Cache,
    step: Step,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    sinks: Any,
    spans: Any = None,
) -> Any:
    """Return the result of :data:`attention`.

    sinks: [heads] logits, or ``None``. spans: [T, 2], see
    :data:`~inl.ops.span_attention.span_attention`, or ``None``.
    """
    out = np.zeros_like(q)
    _tokens, heads, dim = q.shape
    k_scale, v_scale = (1, 1) if cache.scales is None else cache.scales.astype(q.dtype)
    size, kv_heads = cache.k.shape[1:3]
    for row, length in enumerate(step.lengths):
        start, stop = step.starts[row], step.starts[row + 1]
        if stop == start:
            continue
        ids = step.blocks[group, row, : -(-int(length) // size)]
        k = (
            cache.k[ids].reshape(-1, kv_heads, dim)[:length].transpose(1, 2, 0)
            * k_scale
        )
        v = (
            cache.v[ids].reshape(-1, kv_heads, dim)[:length].transpose(1, 0, 2)
            * v_scale
        )
        queries = q[start:stop].reshape(-1, kv_heads, heads // kv_heads, dim)
        scores = queries.transpose(1, 2, 0, 3) @ k[:, None] * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        distance = step.positions[start:stop, None] - np.arange(length)
        visible = distance >= 0
        if spans is not None:
            first, end = spans[start:stop, :1], spans[start:stop, 1:]
            visible |= (np.arange(length) >= first) & (np.arange(length) < end)
        if window is not None:
            visible &= distance < window
        scores = np.where(visible, scores, np.finfo(scores.dtype).min)
        highest = scores.max(-1, keepdims=True)
        if sinks is not None:
            highest = np.maximum(highest, sinks.reshape(kv_heads, -1, 1, 1))
        weights = np.exp(scores - highest)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.reshape(kv_heads, -1, 1, 1) - highest)
        weights = weights / total
        result = (weights @ v[:, None]).transpose(2, 0, 1, 3)
        out[start:stop] = result.reshape(-1, heads, dim)
    return out


def _attend_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, *_ in SHAPES:
        case = attention_case(rng, name, (6, 2, 16), {})
        q, cache, step = case.args
        k, v = rng.standard_normal((2, q.shape[0], 2, 16))
        # Padding tokens all write to position 0, in any order: give them one value.
        k[step.used_counts[2] :] = v[step.used_counts[2] :] = 0
        yield Case(case.name, (q, k, v, cache, step), case.attrs)


def attend_traffic(
    results: Any, q: Any, k: Any, v: Any, cache: Any, step: Any,
    *, window: int | None = None, **_: Any,
) -> int:  # fmt: skip
    """Bytes of :data:`attend`: operands, result, written and read cache positions."""
    tokens, kv_heads, dim = k.shape
    written = tokens * kv_token_bytes(kv_heads, dim, str(cache.k.dtype))
    read = cached_bytes(cache, step, window)
    return int(nbytes((q, k, v, results[0])) + written + read)


@op(
    cases=_attend_cases,
    consumes=("cache",),
    flops=lambda q, _k, _v, cache, step, **a: attention_flops(q, cache, step, **a),
    traffic=attend_traffic,
)
def attend(
    ops: Ops,
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    group: int = 0,
) -> tuple[Array, Cache]:
    """Write keys and values to the cache, then compute attention.

    q: [T, heads, d]. k, v: [T, kv_heads, d]. Attributes as in :data:`attention`.
    Returns the result [T, heads, d] and the cache.
    """
    cache = ops.write_kv(k, v, cache, step.writes[group])
    out = ops.attention(
        q, cache, step, scale=scale, window=window, cap=cap, group=group
    )
    return out, cache
