"""Attention of a step of one row: cuDNN for the chunk, then the cached prefix.

The attention of a chunk to itself is one cuDNN call, which is faster than a kernel that
gathers keys from the cache. The keys of earlier steps are added from the cache
afterwards, and both results are merged by their log-sum-exp.
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
from inl_torch.triton.attention.tiles import LOG2E, accumulate_tile
from inl_torch.triton.common import dense

MIN_TOKENS = 1024
"""Fewest tokens for which cuDNN is faster."""

TILE_ROWS = 128
"""Rows of a tile: queries times heads."""

KEYS = 64


def uses_library(
    q: torch.Tensor, step: Step, *, window: int | None, cap: float | None
) -> bool:
    """Whether cuDNN supports this attention and is faster than the Triton kernel."""
    tokens, heads, dim = q.shape
    return (
        step.lengths.shape[0] == 1
        and tokens >= MIN_TOKENS
        and q.dtype == torch.bfloat16
        and dim == 128
        and heads <= TILE_ROWS
        and window is None
        and cap is None
        and is_hopper(q.device)
    )


def is_hopper(position: torch.device) -> bool:
    """Whether the chip has compute capability 9.0, on which cuDNN was measured."""
    if position.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(position) == (9, 0)


@triton.jit
def attend_before(
    q: tensor, k: tensor, v: tensor, table: tensor, positions: tensor, starts: tensor,
    work: tensor, lse: tensor, out: tensor, width: tensor, tokens: tensor,
    scale: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, KEYS: tl.constexpr, M: tl.constexpr,
) -> None:  # fmt: skip
    """Merge attention to the keys cached before the row's first token into ``out``.

    lse: [heads, tokens] natural log-sum-exp of the scores behind ``out``. Padding
    becomes 0.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(work + tile * 3).to(tl.int64)
    first = tl.load(work + tile * 3 + 1).to(tl.int64)
    count = tl.load(work + tile * 3 + 2)
    padding = row < 0
    first_token = tl.load(starts + tl.where(padding, 0, row))
    last = tl.load(positions + first_token).to(tl.int32)
    if (count == 0) | ((last == 0) & (row >= 0)):
        return
    last = tl.where(padding, 0, last)
    m = tl.arange(0, M)
    token = first + m // GROUP
    is_token = m // GROUP < count
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, DIM)
    offsets = (token * (KV_HEADS * GROUP) + head)[:, None] * DIM + d[None, :]
    x = tl.load(q + offsets, mask=is_token[:, None], other=0)
    acc = tl.load(out + offsets, mask=is_token[:, None], other=0).to(tl.float32)
    m_i = tl.load(lse + head * tokens + token, mask=is_token, other=0) * LOG2E
    l_i = tl.full((M,), 1.0, tl.float32)
    key_range = tl.arange(0, KEYS)
    row_table = table + row * width
    # All these keys precede every query.
    position = tl.zeros((M,), tl.int32) + last
    full_tiles = last // KEYS * KEYS
    for start in range(0, full_tiles, KEYS):
        m_i, l_i, acc = accumulate_tile(
            x, k, v, row_table, start + key_range, position, last, kv_head, scale, 0,
            1.0, m_i, l_i, acc, SIZE, KV_HEADS, DIM, DIM, False, False, False,
        )  # fmt: skip
    for start in range(full_tiles, last, KEYS):
        m_i, l_i, acc = accumulate_tile(
            x, k, v, row_table, start + key_range, position, last, kv_head, scale, 0,
            1.0, m_i, l_i, acc, SIZE, KV_HEADS, DIM, DIM, True, False, False,
        )  # fmt: skip
    acc = tl.where(padding, 0.0, acc / l_i[:, None])
    tl.store(out + offsets, acc, mask=is_token[:, None])


def attend_self(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a chunk to itself: [T, heads, d], and the natural log-sum-exp
    of its scores, [heads, T].
    """
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, lse = attend(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]
    return out[0].transpose(0, 1), lse.reshape(lse.shape[1:3])


def attend_prompt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, step: Step,
    work: Work, *, scale: float, group: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of the tokens of one row: [T, heads, d].

    q, k: rotated. k, v: also written to the cache already.
    """
    tokens, heads, dim = q.shape
    size, kv_heads = cache.k.shape[1:3]
    out, lse = attend_self(q, k, v, scale)
    out, q, lse = out.contiguous(), dense(q), lse.contiguous()
    group_size = heads // kv_heads
    table = step.blocks[group].contiguous()
    tiles = work.tiles(TILE_ROWS // group_size, all_tokens=True)
    attend_before[(kv_heads, tiles.shape[0])](
        q, cache.k, cache.v, table, step.positions, step.starts, tiles, lse, out,
        table.shape[1], tokens, scale * LOG2E.value, SIZE=size, KV_HEADS=kv_heads,
        GROUP=group_size, DIM=dim, KEYS=KEYS, M=TILE_ROWS, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
