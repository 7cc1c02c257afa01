"""Rotation, cache write and attention: of a decoding step in one launch."""

from __future__ import annotations

import torch

from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_torch.triton.attention.attention import HEADS, MOST_SPLITS, attended
from inl_torch.triton.attention.cache import write_kv
from inl_torch.triton.attention.plan import Work
from inl_torch.triton.attention.prompt import attend_prompt, suits
from inl_torch.triton.attention.rope import rope
from inl_torch.triton.attention.rope_attend_kernels import rope_attend
from inl_torch.triton.attention.rope_write import rope_write
from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.common import dense, power
from inl_torch.triton.tuning import EARLY_ROWS, Attend, Tuning

LABEL = "attend_project/triton"
"""Where a step keeps the counters."""

MOST_HEADS = 256
"""Most programs across the heads of a token."""

ALONE = 3
"""Tiles of keys that one program attends to sooner than two could add up theirs, where
there are several rows."""

MANY = 1024
"""Programs of one split from which memory is the limit, whatever each one does."""


def plan(step: Step, *, block_size: int) -> torch.Tensor | Work:  # noqa: ARG001
    """Counters of arrivals, int32 [T, MOST_HEADS], which every layer leaves zero; or
    lists of work, where there are more tokens than rows.
    """
    tokens = step.positions.shape[0]
    if tokens != step.lengths.shape[0]:
        return Work(step)
    shape = (tokens, MOST_HEADS)
    return torch.zeros(shape, dtype=torch.int32, device=step.positions.device)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float, window: int | None,
    cap: float | None, group: int, tuning: Tuning, label: str = LABEL,
) -> torch.Tensor:  # fmt: skip
    """What every head of every token found: [T, heads, d].

    label: of the kernel whose plan the step holds.
    """
    shared_work = step.plan[label] if step.plan else plan(step, block_size=0)
    if isinstance(shared_work, Work):
        if suits(q, step, window=window, cap=cap):
            q, k = rope(q, k, cos, sin)
            cache = write_kv(k, v, cache, step.writes[group])
            return attend_prompt(
                q, k, v, cache, step, shared_work, scale=scale, group=group
            )
        q = rope_write(q, k, v, cos, sin, cache, step.writes[group])
        return attended(
            q, cache, step, shared_work, scale=scale, window=window, cap=cap,
            group=group,
        )  # fmt: skip
    q, k, v = dense(q), dense(k), dense(v)
    tokens, heads, dim = q.shape
    (size, kv_heads), width = cache.k.shape[1:3], step.blocks.shape[2]
    shared = heads // kv_heads
    lanes = min(power(shared), HEADS)
    across = kv_heads * -(-shared // lanes)
    way = tuning.attend or cut(dim, q.dtype, tokens, tokens * across)
    keys = way.keys
    splits = split_count(tokens * across, -(-width * size // keys), tuning, way.waves)
    one, ahead = tokens == 1, tokens <= EARLY_ROWS and q.dtype != torch.float32
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    shape = (tokens, heads, splits)
    part = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    masses = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    rope_attend[(across, tokens, splits)](
        q, k, v, cos, sin, cache.k, cache.v, step.blocks[group], step.rows,
        step.positions, step.starts, step.used_counts, step.writes[group], out, part, masses,
        shared_work, q.stride(0), k.stride(0), v.stride(0), width,
        scale if cap else scale * LOG2E.value, window or 0, cap or 1.0,
        ONE=one, SIZE=size, KV_HEADS=kv_heads, SHARED=shared, LANES=lanes,
        HALF=dim // 2, DIM_P=max(power(dim), 16), KEYS=keys, SPLITS=splits,
        M=max(lanes, 16), WINDOWED=window is not None, CAPPED=cap is not None,
        EARLY=tuning.starts_early(tokens), AHEAD=ahead, ALONE=1 if one else ALONE,
        num_warps=way.warps, num_stages=way.stages, **tuning.launch(tokens),
    )  # fmt: skip
    return out


def split_count(programs: int, tiles: int, tuning: Tuning, waves: int) -> int:
    """Parts that a row's keys are cut into: no more programs than ``waves`` of them.

    A split too many costs more than one too few: whoever has no keys still takes the
    place of a program that has.
    """
    wanted = max(waves * tuning.processors // programs, 1)
    return min(1 << wanted.bit_length() - 1, MOST_SPLITS, power(tiles))


def cut(dim: int, dtype: torch.dtype, tokens: int, programs: int) -> Attend:
    """Keys of a tile and warps of a program, by what was measured on an H200.

    programs: those of one split. Few of them have to be quick, and hold many keys on
    their way; many of them read as fast as memory goes where each is small.
    """
    if dtype == torch.float32:
        return Attend(32, 2, 8, 2) if dim > 64 else Attend(64, 2, 4, 2)
    if tokens > EARLY_ROWS:
        if dim > 64:
            return Attend(16, 8, 1 if dim <= 128 else 2, 3)
        return Attend(32, 8, 1, 2) if programs >= MANY else Attend(64, 8, 4, 2)
    if dim > 128:
        return Attend(64, 2, 8, 2)
    if dim > 64:
        return Attend(32, 2, 2, 2) if tokens == 1 else Attend(128, 2, 8, 2)
    if tokens == 1:
        return Attend(64, 2, 4, 2)
    return Attend(128, 2 if tokens <= EARLY_ROWS // 2 else 4, 4, 2)
