"""Causal attention over a paged cache, for rows of any number of tokens.

Tokens are grouped to tiles of one row each. The blocks of each tile's row are gathered
as far as the block table reaches; programs are compiled for several of its widths.
"""

from __future__ import annotations

from typing import NamedTuple

from inl.ops.sink_attention import Sinks
from inl.spec.step import Step
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import Exportable, kernel
from inl_onnx.pages import Pages

LABEL, SINK_LABEL = "attention/onnx", "sink_attention/onnx"
"""Keys of these kernels' plans in ``Step.plan``."""

TILE = 32
"""Tokens of a tile in steps that include prompts; 1 in steps of decoding rows."""

MASKED = -1e30
"""Score of a masked key; finite, since the difference of two infinities is NaN."""


class Plan(NamedTuple):
    """Tiles of a step, shared by all layers. ``N`` tiles of ``Q`` tokens."""

    tokens: Value
    """[N, Q] index of the token."""
    positions: Value
    """[N, Q] position of the token in its sequence; -1 for padding."""
    rows: Value
    """[N] row of the tile."""
    place: Value
    """[T] place of each token among the N * Q of all tiles."""
    used: Value
    """[T] whether the token is not padding."""


def plan(step: Step, *, block_size: int) -> Plan:  # noqa: ARG001
    """Group the tokens of a step to tiles."""
    total, rows = step.tokens.shape[0], step.lengths.shape[0]
    size = 1 if total <= rows else TILE
    number = total if size == 1 else -(-total // size) + rows
    tiles = (step.starts[1:] - step.starts[:-1] + (size - 1)) // size
    ends = fn.cumsum(tiles)
    index = fn.arange(ends, number)
    passed = fn.sum_of((index[:, None] >= ends).astype("int32"))
    row = fn.minimum(passed, rows - 1)
    inner = (index - fn.take(ends - tiles, row))[:, None] * size
    offsets = inner + fn.arange(ends, size)
    tokens = fn.take(step.starts, row)[:, None] + offsets
    valid = (index < ends[-1])[:, None] & (
        tokens < fn.take(step.starts, row + 1)[:, None]
    )
    tokens = fn.clip(tokens, 0, total - 1)
    offset = fn.arange(ends, total) - fn.take(step.starts, step.rows)
    place = fn.take(ends - tiles, step.rows) * size + offset
    return Plan(
        tokens=tokens,
        positions=fn.where(valid, fn.take(step.positions, tokens), -1),
        rows=row,
        place=fn.clip(place, 0, number * size - 1),
        used=fn.arange(ends, total) < step.starts[-1],
    )


def attention(
    q: Value,
    cache: Pages,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Value:
    tiles = _plan_of(step, LABEL, cache)
    return _over_blocks(q, cache, step, tiles, scale, window, cap, group)


def sink_attention(
    q: Value,
    cache: Pages,
    step: Step,
    w: Sinks,
    *,
    scale: float,
    window: int | None,
    group: int,
) -> Value:
    tiles = _plan_of(step, SINK_LABEL, cache)
    return _over_blocks(q, cache, step, tiles, scale, window, None, group, w.logits)


def _plan_of(step: Step, label: str, cache: Pages) -> Plan:
    found = step.plan.get(label) if isinstance(step.plan, dict) else None
    return plan(step, block_size=cache.k.shape[2]) if found is None else found


def _over_blocks(
    q: Value,
    cache: Pages,
    step: Step,
    tiles: Plan,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    sinks: Value | None = None,
) -> Value:
    """Compute attention; sinks: [heads] logits without a key."""
    _, heads, dim = q.shape
    kv_heads, _, size, _ = cache.k.shape
    number, queries = tiles.tokens.shape
    ids = fn.take(step.blocks[group], tiles.rows)
    keys = ids.shape[1] * size
    k, v = (
        fn.upcast(fn.take(part, ids, 1)).reshape(kv_heads, number, keys, dim)
        for part in (cache.k, cache.v)
    )
    visible = visible_keys(tiles, keys, window)
    # A cell beyond every query may hold the NaN of an earlier request.
    v = fn.where(fn.any_of(visible, 1)[:, :, None], v, 0)
    split = fn.take(q, tiles.tokens).reshape(number, queries, kv_heads, -1, dim)
    per_head = fn.upcast(fn.transpose(split, 2, 0, 3, 1, 4) * scale)
    flat = per_head.reshape(kv_heads, number, -1, dim)
    scores = fn.matmul(flat, fn.transpose(k, 0, 1, 3, 2))
    if cap is not None:
        scores = fn.tanh(scores / cap) * cap
    scores = scores.reshape(kv_heads, number, -1, queries, keys)
    scores = fn.where(visible[None, :, None], scores, MASKED)
    if sinks is not None:
        shape = (kv_heads, number, heads // kv_heads, queries, 1)
        each = fn.upcast(sinks).reshape(kv_heads, 1, -1, 1, 1)
        scores = fn.concatenate([scores, fn.broadcast_to(each, shape)], -1)
    weights = fn.softmax(scores)[..., :keys].reshape(kv_heads, number, -1, keys)
    out = fn.matmul(weights, v).reshape(kv_heads, number, -1, queries, dim)
    out = fn.transpose(out, 1, 3, 0, 2, 4).reshape(-1, heads, dim)
    result = fn.where(tiles.used[:, None, None], fn.take(out, tiles.place), 0)
    return result.astype(q.dtype)


def visible_keys(tiles: Plan, keys: int, window: int | None) -> Value:
    """Return which keys each query attends to: bool [N, Q, keys]."""
    distance = tiles.positions[:, :, None] - fn.arange(tiles.rows, keys)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def write_kv(k: Value, v: Value, cache: Pages, writes: Value) -> Pages:
    heads, _, size, _ = cache.k.shape
    head = fn.arange(writes, heads)[:, None]
    at = head, writes // size, writes % size
    k, v = (
        fn.put(own, at, fn.transpose(x, 1, 0, 2))
        for own, x in zip(cache, (k, v), strict=True)
    )
    return Pages(k, v)


KERNELS = (
    kernel(attention, plan=Exportable(plan)),
    kernel(sink_attention, plan=Exportable(plan)),
    kernel(write_kv),
)
