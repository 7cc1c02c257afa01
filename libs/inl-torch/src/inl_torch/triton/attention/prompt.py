"""Attention of a step that is one row: by cuDNN, and then to what was cached before.

A chunk attends to itself in one call of the library, which is faster than a program
that gathers its keys; keys of earlier steps are met afterwards, from the cache, and
what both found is weighed by the logarithms of their masses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_torch.triton.attention.plan import Work
from inl_torch.triton.attention.tiles import LOG2E, met
from inl_torch.triton.common import dense

FEWEST_TOKENS = 1024
"""Tokens from which the library is faster."""

TILE = 128
"""Rows of a tile: queries and heads."""

KEYS = 64


def suits(
    q: torch.Tensor, step: Step, *, window: int | None, cap: float | None
) -> bool:
    """Whether the library computes this, and sooner than our own program."""
    tokens, heads, dim = q.shape
    return (
        step.lengths.shape[0] == 1
        and tokens >= FEWEST_TOKENS
        and q.dtype == torch.bfloat16
        and dim == 128
        and heads <= TILE
        and window is None
        and cap is None
        and hopper(q.device)
    )


def hopper(place: torch.device) -> bool:
    """Whether the chip is one on which cuDNN's attention was measured."""
    if place.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(place) == (9, 0)


@triton.jit
def attend_before(
    q: tensor, k: tensor, v: tensor, table: tensor, positions: tensor, starts: tensor,
    work: tensor, sums: tensor, out: tensor, width: tensor, tokens: tensor,
    scale: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr,
    DIM: tl.constexpr, KEYS: tl.constexpr, M: tl.constexpr,
) -> None:  # fmt: skip
    """Add to ``out`` what a tile finds in keys cached before its row's first token.

    sums: [heads, tokens] natural logarithms of the masses behind ``out``. Padding gets
    zeros.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(work + tile * 3).to(tl.int64)
    first = tl.load(work + tile * 3 + 1).to(tl.int64)
    count = tl.load(work + tile * 3 + 2)
    padding = row < 0
    oldest = tl.load(starts + tl.where(padding, 0, row))
    last = tl.load(positions + oldest).to(tl.int32)
    if (count == 0) | ((last == 0) & (row >= 0)):
        return
    last = tl.where(padding, 0, last)
    m = tl.arange(0, M)
    token = first + m // SHARED
    mine = m // SHARED < count
    head = kv_head * SHARED + m % SHARED
    d = tl.arange(0, DIM)
    cells = (token * (KV_HEADS * SHARED) + head)[:, None] * DIM + d[None, :]
    x = tl.load(q + cells, mask=mine[:, None], other=0)
    result = tl.load(out + cells, mask=mine[:, None], other=0).to(tl.float32)
    top = tl.load(sums + head * tokens + token, mask=mine, other=0) * LOG2E
    total = tl.full((M,), 1.0, tl.float32)
    near = tl.arange(0, KEYS)
    pages = table + row * width
    # Every query comes after all these keys.
    place = tl.zeros((M,), tl.int32) + last
    whole = last // KEYS * KEYS
    for start in range(0, whole, KEYS):
        top, total, result = met(
            x, k, v, pages, start + near, place, last, kv_head, scale, 0, 1.0, top,
            total, result, SIZE, KV_HEADS, DIM, DIM, False, False, False,
        )  # fmt: skip
    for start in range(whole, last, KEYS):
        top, total, result = met(
            x, k, v, pages, start + near, place, last, kv_head, scale, 0, 1.0, top,
            total, result, SIZE, KV_HEADS, DIM, DIM, True, False, False,
        )  # fmt: skip
    result = tl.where(padding, 0.0, result / total[:, None])
    tl.store(out + cells, result, mask=mine[:, None])


def itself(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token finds among the tokens up to it: [T, heads, d], and the natural
    logarithms of its masses, [heads, T].
    """
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, sums = attend(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]
    return out[0].transpose(0, 1), sums.reshape(sums.shape[1:3])


def attend_prompt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, step: Step,
    work: Work, *, scale: float, group: int,
) -> torch.Tensor:  # fmt: skip
    """What the heads of one row's tokens find: [T, heads, d].

    q, k: rotated; k, v: cached already.
    """
    tokens, heads, dim = q.shape
    size, kv_heads = cache.k.shape[1:3]
    out, sums = itself(q, k, v, scale)
    out, q, sums = out.contiguous(), dense(q), sums.contiguous()
    shared = heads // kv_heads
    table = step.blocks[group].contiguous()
    tiles = work.tiles(TILE // shared, every=True)
    attend_before[(kv_heads, tiles.shape[0])](
        q, cache.k, cache.v, table, step.positions, step.starts, tiles, sums, out,
        table.shape[1], tokens, scale * LOG2E.value, SIZE=size, KV_HEADS=kv_heads,
        SHARED=shared, DIM=dim, KEYS=KEYS, M=TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
