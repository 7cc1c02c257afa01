"""Causal attention over a paged cache, flash style: no score leaves its program.

A program takes a block of queries of one row and the heads that share its keys. Where
a step has as many rows as tokens, a block is one token, whose keys are split over
several programs and combined afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from inl.spec.kernel import Kernel
from inl.spec.values import Cache, Step
from inl_torch.triton.attention_kernels import attend, combine
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype

LABEL = "attention/triton"
"""Where a step keeps this kernel's work list."""

QUERIES = 16
"""Tokens in a block of queries."""

PROGRAMS = 264
"""Programs worth splitting keys for."""

MOST_SPLITS = 32
SINGLES = 8
"""Tokens up to which each is a block of its own, whoever it belongs to."""

HEADS = 8
"""Most heads of one program."""


def plan(step: Step, *, block_size: int) -> Any:  # noqa: ARG001
    """List the blocks of queries, int32 [blocks, 3]: row, first token, tokens.

    Nothing where every token is a block. A row ends in the middle of a block, so there
    may be one more of them for each row; the list has that fixed length.
    """
    tokens, rows = step.positions.shape[0], step.lengths.shape[0]
    if _single(tokens, rows):
        return ()
    starts = step.starts.long()
    blocks = (starts[1:] - starts[:-1] + QUERIES - 1) // QUERIES
    ends = blocks.cumsum(0)
    index = torch.arange(-(-tokens // QUERIES) + rows, device=starts.device)
    row = (index.unsqueeze(1) >= ends).sum(1)
    mine = row.clamp(max=rows - 1)
    first = starts[mine] + (index - (ends - blocks)[mine]) * QUERIES
    count = (starts[mine + 1] - first).clamp(0, QUERIES).masked_fill(row >= rows, 0)
    return torch.stack((mine, first, count), 1).int()


def _single(tokens: int, rows: int) -> bool:
    return tokens == rows or tokens <= SINGLES


def attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    size, kv_heads = cache.k.shape[1:3]
    rows, width = step.blocks.shape[1:]
    shared = heads // kv_heads
    lanes = min(power(shared), HEADS)
    single = _single(tokens, rows)
    wide = q.dtype == torch.float32
    keys = 16 if wide else 64
    across = kv_heads * -(-shared // lanes)
    splits = _splits(tokens * across, -(-width * size // keys)) if single else 1
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    work, blocks = step.positions, tokens
    if not single:
        work = step.plan[LABEL] if step.plan else plan(step, block_size=size)
        blocks = work.shape[0]
        out.zero_()
    q = dense(q)
    part = out
    sums = step.positions
    if splits > 1:
        shape = (tokens, heads, splits)
        part = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    attend[(blocks, across, splits)](
        q, cache.k, cache.v, step.blocks[group].contiguous(), step.rows,
        step.positions, step.counts, work, part, sums,
        q.stride(0), width, scale, window or 0, cap or 1.0,
        SIZE=size, KV_HEADS=kv_heads, SHARED=shared, LANES=lanes, DIM=dim,
        DIM_P=max(power(dim), 16), KEYS=keys, SPLITS=splits, SINGLE=single,
        M=max(lanes * (1 if single else QUERIES), 16),
        WINDOWED=window is not None, CAPPED=cap is not None,
        num_warps=8 if wide else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        combine[(tokens * heads,)](
            part, sums, out, DIM=dim, DIM_P=power(dim), SPLITS=splits, num_warps=1
        )
    return out


def _splits(programs: int, most: int) -> int:
    wanted = triton.cdiv(PROGRAMS, programs)
    return min(power(wanted), MOST_SPLITS, power(most))


def _refuse(q: Any, *_: Any, **__: Any) -> str | None:
    if q.shape[2] > 256:
        return f"heads of {q.shape[2]} elements, takes 256 at most"
    return refuse_dtype(q)


KERNELS = (
    Kernel(
        "attention",
        "triton",
        attention,
        refuse=_refuse,
        plan=plan,
        preference=PREFERENCE,
    ),
)
