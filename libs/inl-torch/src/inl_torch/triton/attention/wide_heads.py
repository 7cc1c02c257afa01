"""Attention of heads that are too wide for tiles of queries: latents (DeepSeek-V2).

A program computes one token for a tile of its heads, which share their keys: with a
hundred heads of one key, a tile of the matrix units is full without other tokens. The
keys of few tokens are divided between programs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.attention.attention import LARGEST_SHARED_BYTES
from inl_torch.triton.common import PREFERENCE, dense, dtype_name, power, refuse_dtype
from inl_torch.triton.indexed.kernels import combine_parts
from inl_torch.triton.tuning import Tuning

LEAST: Final = 16
"""Fewest elements of an axis of a product."""
WIDEST: Final = 1024
"""Most elements of a head."""
PROGRAMS: Final = 264
"""Programs of attention, about, for few tokens."""
MOST_PARTS: Final = 64


class Tile(NamedTuple):
    """Launch parameters."""

    heads: int
    """At most."""
    keys: int
    warps: int
    stages: int


@triton.jit
def attend_wide(
    q: tensor, k: tensor, v: tensor, out: tensor, highest: tensor, sums: tensor,
    table: tensor, rows: tensor, positions: tensor, used_counts: tensor, scale: tensor,
    q_stride: tensor, table_stride: tensor, kv_heads: tensor, group: tensor,
    width: tensor, size: tensor, HEADS: tl.constexpr, WIDE: tl.constexpr,
    REST: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of a token over the keys of its row, or with ``SPLIT`` over a part.

    Elements of a head are the first WIDE and the REST, a power of two each. Tokens from
    ``used_counts[2]`` on are padding, whose output is 0.
    """
    token = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(2), tl.num_programs(2)
    chunks = tl.cdiv(group, HEADS)
    kv_head = tl.program_id(1) // chunks
    lane = tl.program_id(1) % chunks * HEADS + tl.arange(0, HEADS)
    live, head = lane < group, kv_head * group + lane
    a, b = tl.arange(0, WIDE), WIDE + tl.arange(0, REST)
    base = q + token * q_stride + head[:, None] * width
    query = tl.load(base + a[None, :], mask=live[:, None], other=0)
    rest = live[:, None] & (b < width)[None, :]
    query_rest = tl.load(base + b[None, :], mask=rest, other=0)
    top = tl.full((HEADS,), -1.0e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    found = tl.zeros((HEADS, WIDE), tl.float32)
    found_rest = tl.zeros((HEADS, REST), tl.float32)
    row = table + tl.load(rows + token).to(tl.int64) * table_stride
    end = tl.load(positions + token).to(tl.int32) + 1
    end = tl.where(token < tl.load(used_counts + 2), end, 0)
    first, stop = 0, end
    if SPLIT:
        own = tl.cdiv(tl.cdiv(end, KEYS), parts) * KEYS
        first = part * own
        stop = tl.minimum(first + own, end)
    for start in range(first, stop, KEYS):
        place = start + tl.arange(0, KEYS)
        valid = place < stop
        block = tl.load(row + place // size, mask=valid, other=0).to(tl.int64)
        cell = ((block * size + place % size) * kv_heads + kv_head)[:, None] * width
        seen, seen_rest = valid[:, None], valid[:, None] & (b < width)[None, :]
        key = tl.load(k + cell + a[None, :], mask=seen, other=0)
        key_rest = tl.load(k + cell + b[None, :], mask=seen_rest, other=0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.dot(query_rest, tl.trans(key_rest), score, input_precision="ieee")
        score = tl.where(valid[None, :], score * scale, -1.0e30)
        new = tl.maximum(top, tl.max(score, 1))
        share = tl.where(valid[None, :], tl.exp(score - new[:, None]), 0)
        change = tl.exp(top - new)
        total = total * change + tl.sum(share, 1)
        value = tl.load(v + cell + a[None, :], mask=seen, other=0)
        value_rest = tl.load(v + cell + b[None, :], mask=seen_rest, other=0)
        share = share.to(value.dtype)
        found = tl.dot(share, value, found * change[:, None], input_precision="ieee")
        found_rest = tl.dot(
            share, value_rest, found_rest * change[:, None], input_precision="ieee"
        )
        top = new
    heads = kv_heads * group
    place = token * heads + head
    if SPLIT:
        place += part * tl.num_programs(0) * heads
        tl.store(highest + place, top, mask=live)
        tl.store(sums + place, total, mask=live)
    else:
        share = 1 / tl.where(total > 0, total, 1)[:, None]
        found, found_rest = found * share, found_rest * share
    target = out + place[:, None] * width
    tl.store(target + a[None, :], found, mask=live[:, None])
    tl.store(target + b[None, :], found_rest, mask=rest)


def attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None = None,  # noqa: ARG001 - refused
    cap: float | None = None,  # noqa: ARG001 - refused
    group: int,
    tuning: Tuning,
) -> torch.Tensor:
    q, table = dense(q), step.blocks[group].contiguous()
    (tokens, heads, width), (size, kv_heads) = q.shape, cache.k.shape[1:3]
    shared = heads // kv_heads
    tile = tile_of(shared, tuning, is_float32=q.dtype == torch.float32)
    programs = kv_heads * -(-shared // tile.heads)
    parts = parts_of(tokens * programs)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums, highest, totals = out, None, None
    if parts > 1:
        options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        sums = torch.empty((parts, tokens, heads, width), **options)
        highest, totals = torch.empty((2, parts, tokens, heads), **options)
    wide = power(width + 1) // 2
    attend_wide[(tokens, programs, parts)](
        q, cache.k, cache.v, sums, highest, totals, table, step.rows, step.positions,
        step.used_counts, scale, q.stride(0), table.stride(0), kv_heads, shared, width,
        size, HEADS=tile.heads, WIDE=wide, REST=max(power(width - wide), LEAST),
        KEYS=tile.keys, SPLIT=parts > 1, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        combine_parts[(tokens * heads,)](
            out, sums, highest, totals, heads, width, tokens, PARTS=parts,
            LANES=power(width),
        )  # fmt: skip
    return out


def tile_of(shared: int, tuning: Tuning, *, is_float32: bool) -> Tile:
    """Return the tile for heads of a key.

    64 heads take a few more registers than there are; on an H100 a prompt took 0.55 of
    the time of tiles of 32.
    """
    if is_float32:
        return Tile(LEAST, 16, 8, 1)
    if tuning.shared_bytes < LARGEST_SHARED_BYTES:
        return Tile(LEAST, 32, 8, 1)
    return Tile(min(max(power(shared), LEAST), 64), 32, 8, 2)


def parts_of(programs: int) -> int:
    """Return the parts of the keys of each token: a power of two."""
    return min(max(power(PROGRAMS // max(programs, 1) + 1) // 2, 1), MOST_PARTS)


def _refuse(
    q: Any, cache: Any, _step: Any, *, tuning: Tuning, window: int | None = None,
    cap: float | None = None, **_: Any,
) -> str | None:  # fmt: skip
    width = q.shape[2]
    if not tuning.max_head_dim < width <= WIDEST:
        return (
            f"heads of {width} elements, takes {tuning.max_head_dim + 1} to {WIDEST}: "
            "others are computed in tiles of queries"
        )
    if window is not None or cap is not None:
        return "takes no window and no cap"
    if cache.scales is not None:
        return "takes a cache of the dtype of the queries"
    if torch.version.hip is not None and (
        dtype_name(q) == "float32" or tuning.lanes == 32
    ):
        return "its sums do not fit the registers of AMD's chips, but CDNA's of 16 bits"
    return refuse_dtype(q)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the kernel of wide heads."""
    return (
        Kernel(
            "attention",
            "triton_wide",
            partial(attention, tuning=tuning),
            refuse=partial(_refuse, tuning=tuning),
            preference=PREFERENCE,
        ),
    )
