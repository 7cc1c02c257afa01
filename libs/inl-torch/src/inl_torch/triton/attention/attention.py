"""Causal attention over a paged cache, flash style: no score leaves its program.

Rows of one token attend by themselves, their keys split over several programs and
combined afterwards, and all other tokens in tiles. A step of prompts and decoding rows
does both.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.driver import driver

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.attention.kernels import attend, combine
from inl_torch.triton.attention.plan import Work, plan
from inl_torch.triton.attention.tiles import LOG2E, attend_tiles
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype

LABEL = "attention/triton"
"""Where a step keeps this kernel's lists of work."""

PROGRAMS = 264
"""Programs worth splitting keys for."""

MOST_SPLITS = 32

MIXED_PROGRAMS, MIXED_SPLITS = 4096, 8
"""Likewise, and splits at most, in a step of prompts: few of its rows decode."""

SINGLES = 8
"""Tokens up to which each attends by itself, whoever it belongs to."""

HEADS = 8
"""Most heads of a program for one token."""

ROOMY, SPACIOUS = 98_304, 200_000
"""Bytes of shared memory with which a tile of prompts may be larger, and the largest:
chips that have so much multiply out of it, and others out of registers."""

SMALL = 65536
"""Bytes of it that every chip has."""

LONG = 1 << 16
"""Queries times heads from which the largest tiles fill a chip evenly."""


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
    work = step.plan[LABEL] if step.plan else Work(step)
    return attended(
        q, cache, step, work, scale=scale, window=window, cap=cap, group=group
    )


def attended(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    work: Work,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> torch.Tensor:
    """What the heads of every token find in the cache: [T, heads, d]."""
    tokens, rows = q.shape[0], step.lengths.shape[0]
    q, out = dense(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    table = step.blocks[group].contiguous()
    attrs: dict[str, Any] = {"scale": scale, "window": window, "cap": cap}
    if tokens == rows or tokens <= SINGLES:
        _alone(q, cache, step, table, step.used_counts[2:], tokens, out, False, **attrs)
        return out
    _alone(q, cache, step, table, work.singles, rows, out, True, **attrs)
    _in_tiles(q, cache, step, table, work, out, **attrs)
    return out


def _alone(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    table: torch.Tensor,
    singles: torch.Tensor,
    tokens: int,
    out: torch.Tensor,
    mixed: bool,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
) -> None:
    """Attend the first ``tokens``, each to its row's keys; of a mixed step those
    below ``singles``.
    """
    heads, dim = q.shape[1:]
    size, kv_heads = cache.k.shape[1:3]
    width, shared = table.shape[1], heads // kv_heads
    lanes = min(power(shared), HEADS)
    wide = q.dtype == torch.float32
    keys = 16 if wide else 64
    across = kv_heads * -(-shared // lanes)
    most = min(-(-width * size // keys), MIXED_SPLITS if mixed else MOST_SPLITS)
    splits = _splits(MIXED_PROGRAMS if mixed else PROGRAMS, tokens * across, most)
    part, sums = out, step.positions
    if splits > 1:
        shape = (tokens, heads, splits)
        part = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    attend[(across, tokens, splits)](
        q, cache.k, cache.v, table, step.rows, step.positions, singles, part, sums,
        q.stride(0), width, scale, window or 0, cap or 1.0,
        SIZE=size, KV_HEADS=kv_heads, SHARED=shared, LANES=lanes, DIM=dim,
        DIM_P=max(power(dim), 16), KEYS=keys, SPLITS=splits, M=max(lanes, 16),
        MIXED=mixed, WINDOWED=window is not None, CAPPED=cap is not None,
        num_warps=8 if wide else 2, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        combine[(tokens * heads,)](
            part, sums, singles, out, HEADS=heads, DIM=dim, DIM_P=power(dim),
            SPLITS=splits, MIXED=mixed, num_warps=1,
        )  # fmt: skip


def _splits(wanted: int, programs: int, most: int) -> int:
    return min(power(triton.cdiv(wanted, programs)), power(most))


def _in_tiles(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    table: torch.Tensor,
    work: Work,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
) -> None:
    """Attend the tokens of rows with several, and give padding zeros."""
    heads, dim = q.shape[1:]
    size, kv_heads = cache.k.shape[1:3]
    shared = heads // kv_heads
    shared_memory = shared_bytes(q.device)
    cut = tile(dim, q.dtype == torch.float32, shared_memory, heads * q.shape[0])
    lanes = min(shared, cut.rows)
    tiles = work.tiles(cut.rows // lanes)
    attend_tiles[(kv_heads * -(-shared // lanes), tiles.shape[0])](
        q, cache.k, cache.v, table, step.positions, tiles, out, q.stride(0),
        table.shape[1], scale if cap else scale * LOG2E.value, window or 0, cap or 1.0,
        SIZE=size, KV_HEADS=kv_heads, SHARED=shared, LANES=lanes, DIM=dim,
        DIM_P=max(power(dim), 16), KEYS=cut.keys, M=cut.rows,
        WINDOWED=window is not None, CAPPED=cap is not None, num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip


class Tile(NamedTuple):
    """How a program for prompts is cut."""

    rows: int
    """Queries times heads."""
    keys: int
    """Keys that they meet at once."""
    warps: int
    stages: int


def tile(dim: int, wide: bool, shared: int, work: int) -> Tile:
    """The best that was measured among those that fit ``shared`` bytes.

    work: queries times heads of the step, of which there are tiles enough or not.
    """
    if wide:
        return Tile(64 if dim <= 64 else 32, 16, 8, 2)
    if dim <= 64:
        return Tile(128, 64, 8, 2) if work >= LONG else Tile(64, 64, 4, 2)
    if dim <= 128 and shared >= SPACIOUS:
        return Tile(128, 32, 4, 3)
    return Tile(64, 64 if dim <= 128 and shared >= ROOMY else 32, 4, 2)


@functools.cache
def shared_bytes(place: torch.device) -> int:
    """Shared memory that a program may have; what any chip has, where there is none."""
    if place.type != "cuda":
        return SMALL
    return int(driver.active.utils.get_device_properties(place.index)["max_shared_mem"])


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
