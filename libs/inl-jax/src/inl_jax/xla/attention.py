"""Causal attention over a paged cache, for rows of any number of tokens.

Tokens are grouped to tiles of one row each. A loop over chunks of the context, which
ends at the longest context of the step, gathers the keys and values of each tile and
accumulates a softmax; so neither the block tables' width nor the number of tokens
multiplies the cells that are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inl.ops.sink_attention import Sinks
from inl.spec.step import Step
from inl_jax.pages import Pages, read_kv, write_kv
from inl_jax.tensors import Array, accumulated, einsum, upcast
from inl_jax.xla.kernel import inlined, kernel

LABEL, SINK_LABEL = "attention/xla", "sink_attention/xla"
"""Keys of these kernels' plans in ``Step.plan``."""

TILE = 16
"""Tokens of a tile in steps that include prompts; 1 in steps of decoding rows."""

PADDED = 4
"""Places for tokens that tiles of more than :data:`TILE` tokens add, per token."""

CHUNK = 128
"""Keys per iteration, at least."""

MASKED = -1e30
"""Score of a masked key; finite, since the difference of two infinities is NaN."""


class Plan(NamedTuple):
    """Tiles of a step, shared by all layers. ``N`` tiles of ``Q`` tokens."""

    tokens: Array
    """[N, Q] index of the token."""
    positions: Array
    """[N, Q] position of the token in its sequence; -1 for padding."""
    rows: Array
    """[N] row of the tile."""
    tile: Array
    """[T] tile of each token."""
    offset: Array
    """[T] place of the token in its tile."""
    used: Array
    """[T] whether the token is not padding."""


# The signature of every kernel's plan: this one does not depend on the block size.
def plan(
    step: Step,
    *,
    block_size: int,  # noqa: ARG001
    most: int = TILE,
    unit: int = 1,
) -> Plan:
    """Group the tokens of a step to tiles, of up to ``most`` tokens.

    A row has at least one tile: large ones of few tokens are avoided. Tiles of several
    tokens start at multiples of ``unit``, if need be at a token of the row before.
    """
    total, rows = step.tokens.shape[0], step.lengths.shape[0]
    size = 1 if total <= rows else most
    while size > TILE and size * rows > PADDED * total:
        size //= 2
    starts, stops = step.starts[:-1], step.starts[1:]
    begins = starts if size == 1 else starts // unit * unit
    tiles = jnp.where(stops > starts, -(-(stops - begins) // size), 0)
    ends = jnp.cumsum(tiles)
    index = jnp.arange(total if size == 1 else -(-total // size) + rows)
    row = jnp.minimum((index[:, None] >= ends).sum(1, dtype=jnp.int32), rows - 1)
    first = begins[row] + size * (index - (ends - tiles)[row])
    # The last tiles end with the tokens, and compute some of the tile before again.
    first = jnp.minimum(first, max(total + -total % unit - size, 0))
    tokens = first[:, None] + jnp.arange(size)
    own = (tokens >= starts[row][:, None]) & (tokens < stops[row][:, None])
    valid = (index < ends[-1])[:, None] & own
    tokens = jnp.clip(tokens, 0, total - 1)
    place = jnp.arange(total) - begins[step.rows]
    tile = jnp.clip((ends - tiles)[step.rows] + place // size, 0, len(index) - 1)
    return Plan(
        tokens=tokens,
        positions=jnp.where(valid, step.positions[tokens], -1),
        rows=row,
        tile=tile,
        offset=jnp.arange(total) - first[tile],
        used=jnp.arange(total) < step.starts[-1],
    )


def plan_of(step: Step, label: str, block_size: int, **sizes: int) -> Plan:
    """Return the plan of ``label`` in a step, computed where the step has none."""
    found = step.plan.get(label) if isinstance(step.plan, dict) else None
    return plan(step, block_size=block_size, **sizes) if found is None else found


def attention(
    q: Array,
    cache: Pages,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Array:
    tiles = plan_of(step, LABEL, cache.kv.shape[2])
    return _over_chunks(q, cache, step, tiles, scale, window, cap, group)


def sink_attention(
    q: Array,
    cache: Pages,
    step: Step,
    w: Sinks,
    *,
    scale: float,
    window: int | None,
    group: int,
) -> Array:
    tiles = plan_of(step, SINK_LABEL, cache.kv.shape[2])
    return _over_chunks(q, cache, step, tiles, scale, window, None, group, w.logits)


def span_attention(
    q: Array,
    cache: Pages,
    step: Step,
    spans: Array,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Array:
    tiles = plan(step, block_size=cache.kv.shape[2])
    return _over_chunks(
        q, cache, step, tiles, scale, window, cap, group, spans=spans[tiles.tokens]
    )


def _over_chunks(
    q: Array,
    cache: Pages,
    step: Step,
    tiles: Plan,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    sinks: Array | None = None,
    spans: Array | None = None,
) -> Array:
    """Compute attention; sinks: [heads] logits without a key. spans: [N, Q, 2]."""
    blocks = Blocks(step.blocks[group])
    sums = attend_blocks(q, cache, blocks, tiles, scale, window, cap, spans)
    return finished(sums, tiles, q, sinks)


UNSEEN = 1 << 20
"""Place of an unused entry of a block table: after every query."""


class Blocks(NamedTuple):
    """Blocks of each row, of a whole sequence or of a part of it."""

    ids: Array
    """[R, B] blocks in the cache."""
    places: Array | None = None
    """[R, B] index of the block in its sequence, or :data:`UNSEEN`; ``None``: the
    column."""
    most: Array | None = None
    """[] most blocks of a row; the columns after it are unused. ``None``: as many as
    the queries' positions need."""


class Sums(NamedTuple):
    """Softmax over the keys so far, of ``N`` tiles of ``Q`` tokens in ``K`` groups of
    ``G`` heads, float32.
    """

    highest: Array
    """[N, K, G, Q] largest score."""
    total: Array
    """[N, K, G, Q] sum of the exponentials relative to it."""
    out: Array
    """[N, K, G, Q, head_dim] sum of the values weighted by them."""


def attend_blocks(
    q: Array,
    cache: Pages,
    given: Blocks,
    tiles: Plan,
    scale: float,
    window: int | None,
    cap: float | None,
    spans: Array | None = None,
) -> Sums:
    """Accumulate the softmax over the keys of the given blocks.

    spans: [N, Q, 2] first position and end of keys that each query sees too.
    """
    _, heads, dim = q.shape
    _, kv_heads, size, _ = cache.kv.shape
    blocks = max(1, CHUNK // size)
    table = padded_table(given.ids, blocks)
    places = (
        None if given.places is None else padded_table(given.places, blocks, UNSEEN)
    )
    queries = q[tiles.tokens].reshape(*tiles.tokens.shape, kv_heads, -1, dim)
    keys = blocks * size

    def positions_of(index: Any) -> Array:
        """Return the positions of the keys of a chunk, [N or 1, keys]."""
        if places is None:
            return (index * keys + jnp.arange(keys))[None]
        part = jax.lax.dynamic_slice_in_dim(places, index * blocks, blocks, axis=1)
        found = part[tiles.rows][:, :, None] * size + jnp.arange(size)
        return found.reshape(len(tiles.rows), keys)

    def chunk(index: Any, sums: Sums) -> Sums:
        part = jax.lax.dynamic_slice_in_dim(table, index * blocks, blocks, axis=1)
        ids = part[tiles.rows]
        k, v = read_kv(cache, ids)
        scores = einsum("nqhgd,nhld->nhgql", queries, k) * scale
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        key_positions = positions_of(index)[:, None]
        distance = tiles.positions[:, :, None] - key_positions
        seen = distance >= 0
        if spans is not None:
            after = key_positions >= spans[..., :1]
            inside = after & (key_positions < spans[..., 1:])
            seen |= inside & (tiles.positions >= 0)[:, :, None]
        seen &= distance < (window or jnp.iinfo(jnp.int32).max)
        # A cell beyond every query may hold the NaN of an earlier request.
        v = jnp.where(seen.any(1)[:, None, :, None], v, 0)
        return accumulate(sums, scores, seen[:, None, None], v)

    shape = (len(tiles.rows), kv_heads, heads // kv_heads, tiles.tokens.shape[1])
    zeros = jnp.zeros(shape, accumulated(q))
    start, stop = chunk_range(tiles.positions, window, keys)
    if spans is not None:
        ends = jnp.where(tiles.positions < 0, 0, spans[..., 1])
        stop = jnp.maximum(stop, -(-ends.max() // keys))
    if given.most is not None:
        start, stop = 0, -(-given.most // blocks)
    sums = Sums(zeros + MASKED, zeros, jnp.zeros((*shape, dim), zeros.dtype))
    done: Sums = jax.lax.fori_loop(start, stop, chunk, sums)
    return done


def finished(sums: Sums, tiles: Plan, q: Array, sinks: Array | None) -> Array:
    """Return the attention of each token, in the shape and dtype of ``q``."""
    highest, total, out = sums
    if sinks is not None:
        shared = upcast(sinks).reshape(highest.shape[1], -1, 1)
        top = jnp.maximum(highest, shared)
        out = out * jnp.exp(highest - top)[..., None]
        total = total * jnp.exp(highest - top) + jnp.exp(shared - top)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(*tiles.tokens.shape, *q.shape[1:])
    result = jnp.where(tiles.used[:, None, None], out[tiles.tile, tiles.offset], 0)
    return result.astype(q.dtype)


def accumulate(sums: Sums, scores: Array, seen: Array, v: Array) -> Sums:
    """Add a chunk to the running maximum, the sum and the weighted values."""
    highest, total, out = sums
    scores = jnp.where(seen, scores, MASKED)
    new = jnp.maximum(highest, scores.max(-1))
    mass = jnp.where(seen, jnp.exp(scores - new[..., None]), 0)
    rescale = jnp.exp(highest - new)
    added = einsum("nhgql,nhld->nhgqd", mass, upcast(v))
    out = out * rescale[..., None] + added
    return Sums(new, total * rescale + mass.sum(-1), out)


def padded_table(table: Array, blocks: int, fill: int = 0) -> Array:
    """Pad the columns of a block table to whole chunks of ``blocks``, with block 0."""
    width = (0, 0), (0, -table.shape[1] % blocks)
    return jnp.pad(table, width, constant_values=fill)


def chunk_range(positions: Array, window: int | None, keys: int) -> tuple[Any, Any]:
    """Return the first chunk of ``keys`` that any query sees, and the end."""
    stop = (positions.max() + keys) // keys
    if window is None:
        return 0, stop
    least = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions).min()
    return jnp.minimum(jnp.maximum(least - window + 1, 0) // keys, stop), stop


KERNELS = (
    kernel(attention, plan=inlined(plan)),
    kernel(sink_attention, plan=inlined(plan)),
    kernel(span_attention),
    kernel(write_kv),
)
