"""Triton kernels of sparse attention by an indexer.

Tokens from ``used_counts[2]`` on are padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def score_keys(
    q: tensor, weights: tensor, keys: tensor, out: tensor, table: tensor, rows: tensor,
    positions: tensor, used_counts: tensor, first: tensor, q_stride: tensor,
    w_stride: tensor, table_stride: tensor, out_stride: tensor, heads: tensor,
    lanes: tensor, width: tensor, size: tensor, HEADS: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the scores of KEYS cached tokens, minus infinity of those not seen."""
    part = tl.program_id(0).to(tl.int64)
    token = first + part
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    last = tl.load(positions + token)
    last = tl.where(token < tl.load(used_counts + 2), last, -1)
    target = out + part * out_stride + place
    if tl.program_id(1) * KEYS > last:
        tl.store(
            target, tl.full((KEYS,), float("-inf"), tl.float32), mask=place < out_stride
        )
    else:
        seen = place <= last
        row = tl.load(rows + token).to(tl.int64)
        block = tl.load(table + row * table_stride + place // size, mask=seen, other=0)
        cell = block.to(tl.int64) * size + place % size
        lane, head = tl.arange(0, LANES), tl.arange(0, HEADS)
        inside = lane < lanes
        key = tl.load(
            keys + cell[None, :] * width + lane[:, None],
            mask=inside[:, None] & seen[None, :],
            other=0,
        )
        tile = (head[:, None] < heads) & inside[None, :]
        query = tl.load(
            q + token * q_stride + head[:, None] * lanes + lane[None, :],
            mask=tile,
            other=0,
        )
        factor = tl.load(weights + token * w_stride + head, mask=head < heads, other=0)
        products = tl.dot(query, key.to(query.dtype), input_precision="ieee")
        products = tl.maximum(products, 0) * factor.to(tl.float32)[:, None]
        score = tl.where(seen, tl.sum(products, 0), float("-inf"))
        tl.store(target, score, mask=place < out_stride)


@triton.jit
def attend_chosen(
    q: tensor, ids: tensor, values: tensor, out: tensor, highest: tensor, sums: tensor,
    table: tensor, rows: tensor, used_counts: tensor, scale: tensor, q_stride: tensor,
    table_stride: tensor, heads: tensor, width: tensor, count: tensor, size: tensor,
    tokens: tensor, SPLIT: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
    REST: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the latents of SPLIT chosen tokens, weighted relative to the largest score.

    Lanes of a latent are the first WIDE and the REST, a power of two each.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    a, b = tl.arange(0, WIDE), WIDE + tl.arange(0, REST)
    live = head < heads
    base = q + token * q_stride + head[:, None] * width
    query = tl.load(base + a[None, :], mask=live[:, None], other=0)
    rest = live[:, None] & (b < width)[None, :]
    query_rest = tl.load(base + b[None, :], mask=rest, other=0)
    top = tl.full((HEADS,), -1.0e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    found = tl.zeros((HEADS, WIDE), tl.float32)
    found_rest = tl.zeros((HEADS, REST), tl.float32)
    row = tl.load(rows + token).to(tl.int64)
    end = tl.where(token < tl.load(used_counts + 2), count, 0)
    for start in range(part * SPLIT, min(part * SPLIT + SPLIT, end), KEYS):
        at = start + tl.arange(0, KEYS)
        place = tl.load(ids + token * count + at, mask=at < count, other=-1)
        valid = place >= 0
        if tl.max(place, 0) >= 0:
            place = tl.where(valid, place, 0)
            block = tl.load(table + row * table_stride + place // size).to(tl.int64)
            cell = values + (block * size + place % size)[:, None] * width
            latent = tl.load(cell + a[None, :], mask=valid[:, None], other=0)
            latent = latent.to(query.dtype)
            seen = valid[:, None] & (b < width)[None, :]
            latent_rest = tl.load(cell + b[None, :], mask=seen, other=0)
            latent_rest = latent_rest.to(query.dtype)
            scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
            scores += tl.dot(query_rest, tl.trans(latent_rest), input_precision="ieee")
            scores = tl.where(valid[None, :], scores * scale, -1.0e30)
            new = tl.maximum(top, tl.max(scores, 1))
            shares = tl.where(valid[None, :], tl.exp(scores - new[:, None]), 0)
            change = tl.exp(top - new)
            total = total * change + tl.sum(shares, 1)
            mass = shares.to(query.dtype)
            found = found * change[:, None]
            found += tl.dot(mass, latent, input_precision="ieee")
            found_rest = found_rest * change[:, None]
            found_rest += tl.dot(mass, latent_rest, input_precision="ieee")
            top = new
    place = (part * tokens + token) * heads + head
    tl.store(highest + place, top, mask=live)
    tl.store(sums + place, total, mask=live)
    target = out + place[:, None] * width
    tl.store(target + a[None, :], found, mask=live[:, None])
    tl.store(target + b[None, :], found_rest, mask=rest)


@triton.jit
def combine_parts(
    out: tensor, parts: tensor, highest: tensor, sums: tensor, heads: tensor,
    width: tensor, tokens: tensor, PARTS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum of the parts of one head; zeros where nothing was chosen."""
    at, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    top = -1.0e30
    for part in range(PARTS):
        top = tl.maximum(top, tl.load(highest + part * tokens * heads + at))
    total, found = 0.0, tl.zeros((LANES,), tl.float32)
    for part in range(PARTS):
        place = part * tokens * heads + at
        share = tl.exp(tl.load(highest + place) - top)
        total += share * tl.load(sums + place)
        value = tl.load(parts + place * width + lane, mask=lane < width, other=0)
        found += share * value
    found = tl.where(total > 0, found / tl.where(total > 0, total, 1), 0)
    tl.store(out + at * width + lane, found, mask=lane < width)
