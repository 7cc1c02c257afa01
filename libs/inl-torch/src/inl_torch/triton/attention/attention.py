"""Causal flash attention over a paged KV cache.

Rows of one token are computed with their keys split over several programs (split-K),
whose results are merged; all other tokens are computed in tiles, whose keys are split
too in steps of few tiles. A step of prompts and decoding rows uses both.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import torch
from triton.runtime.driver import driver

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.attention.float8 import stored
from inl_torch.triton.attention.kernels import attend, combine
from inl_torch.triton.attention.long_rows import (
    LongRowLimits,
    attend_rows_apart,
    long_row_limits,
    refuse_long_rows,
)
from inl_torch.triton.attention.plan import Work, plan
from inl_torch.triton.attention.tile_splits import (
    MERGED_ROWS,
    MERGED_SPLITS,
    combine_tiles,
)
from inl_torch.triton.attention.tiles import LOG2E, attend_tiles
from inl_torch.triton.common import (
    PREFERENCE,
    dense,
    dtype_name,
    power,
    refuse_dtype,
)
from inl_torch.triton.tuning import AttentionTile, Tuning

GATHERED: Final = "triton_gathered"
"""Name of the kernels that gather the keys of long rows first."""

SPLIT: Final = "triton_split"
"""Name of the kernels that split the keys of tiles."""

NO_WINDOW = 1 << 30
"""More tokens than any context."""

PROGRAMS = 264
"""Number of programs up to which even rows are split."""

SINGLE_TOKEN_LIMIT = 16
"""Most tokens of a step in which each token is computed separately, of any row. Tiles
of so few tokens, as of drafts of one row, would be too few programs for a chip."""

HEADS = 8
"""Most heads per program for one token."""

LARGE_SHARED_BYTES, LARGEST_SHARED_BYTES = 98_304, 200_000
"""Shared memory from which prefill tiles may be larger, and largest: chips that have
this much multiply from shared memory, others from registers."""

MIN_SHARED_BYTES = 65536
"""Shared memory that every chip has, in bytes."""

SINGLE = AttentionTile(1, 64, 2, 2)
SINGLE_FLOAT32 = AttentionTile(1, 16, 8, 2)
"""Tiles of one query per row."""

LARGEST_TILE = AttentionTile(128, 32, 4, 3)

LONG_WORK = 1 << 16
"""Queries times heads from which the largest tiles occupy a chip evenly."""

SHORT_WORK, MEDIUM_WORK = 1 << 11, 1 << 14
"""Queries times heads between which tiles that are split are not the largest. A step of
fewer is often a single tile, whose keys are then read once."""


def attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    tuning: Tuning,
    name: str = "triton",
) -> torch.Tensor:
    work = step.plan[f"attention/{name}"] if step.plan else Work(step)
    return paged_attention(
        q, cache, step, work, scale=scale, window=window, cap=cap, group=group,
        tuning=tuning, name=name,
    )  # fmt: skip


def attention_by_rows(
    q: torch.Tensor, cache: Cache, step: Step, *, scale: float, window: int | None,
    cap: float | None, group: int, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    """Attention whose bits do not depend on the step: tiles of one size, all keys in
    order and by the same code.
    """
    work = step.plan["attention/triton_rows"] if step.plan else Work(step)
    q, out = dense(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _token_tiles(
        q, cache, step, step.blocks[group].contiguous(), work, out, scale=scale,
        window=window or NO_WINDOW, cap=cap, tuning=tuning, invariant=True,
    )  # fmt: skip
    return out


def paged_attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    work: Work,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    tuning: Tuning,
    name: str,
) -> torch.Tensor:
    """Attention of every token over the cache: [T, heads, d].

    name: of the kernel, which tells whether the keys of long rows are gathered first,
    and those of tiles split.
    """
    tokens, rows = q.shape[0], step.lengths.shape[0]
    q, out = dense(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    table = step.blocks[group].contiguous()
    attrs: dict[str, Any] = {
        "scale": scale, "window": window, "cap": cap, "tuning": tuning,
    }  # fmt: skip
    if tokens == rows or tokens <= SINGLE_TOKEN_LIMIT:
        _single_tokens(q, cache, step, table, work, tokens, out, False, **attrs)
        return out
    _single_tokens(q, cache, step, table, work, min(rows, tokens), out, True, **attrs)
    if name == SPLIT:
        _split_tiles(q, cache, step, table, work, out, **attrs)
        return out
    limits = long_row_limits(q, cache, step, tuning) if name == GATHERED else None
    _token_tiles(q, cache, step, table, work, out, **attrs, without=limits)
    if limits is not None:
        found = work.long_rows(limits)
        attend_rows_apart(q, cache, step, table, found, out, scale=scale)
    return out


def _single_tokens(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    table: torch.Tensor,
    work: Work,
    tokens: int,
    out: torch.Tensor,
    mixed: bool,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    tuning: Tuning,
) -> None:
    """Compute the first ``tokens`` tokens, each over the keys of its row; in a mixed
    step those of rows of one token.
    """
    used = work.singles if mixed else step.used_counts[2:]
    heads, dim = q.shape[1:]
    size, kv_heads = cache.k.shape[1:3]
    group_size = heads // kv_heads
    lanes = min(power(group_size), HEADS)
    is_float32 = q.dtype == torch.float32
    tile = tuning.attention_tile("single", dim, is_float32=is_float32)
    tile = tile or (SINGLE_FLOAT32 if is_float32 else SINGLE)
    keys = tile.keys
    head_programs = kv_heads * -(-group_size // lanes)
    # With one for each row, rows of even length are not cut.
    spare = max(PROGRAMS // head_programs - tokens, tokens)
    items = work.items(tokens, spare, keys=keys, window=window, mixed=mixed)
    shape = (tokens + spare, heads)
    split_acc = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    split_stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    attend[(head_programs, tokens + spare)](
        q, *stored(cache), table, step.rows, step.positions, used, items.entries,
        out, split_acc, split_stats, q.stride(0), table.shape[1], scale, window or 0,
        cap or 1.0, cache.scales, SIZE=size, KV_HEADS=kv_heads, GROUP=group_size,
        LANES=lanes, DIM=dim, DIM_P=max(power(dim), 16), KEYS=keys, M=max(lanes, 16),
        WINDOWED=window is not None, CAPPED=cap is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    combine[(tokens, heads)](
        split_acc, split_stats, items.tokens, out, HEADS=heads, DIM=dim,
        DIM_P=power(dim), SPLITS=MERGED_SPLITS, num_warps=1,
    )  # fmt: skip


def _token_tiles(
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
    tuning: Tuning,
    invariant: bool = False,
    without: LongRowLimits | None = None,
) -> None:
    """Compute the tokens of rows with several tokens, or all; padding becomes 0.

    without: limits of long rows, whose tokens are left out.
    """
    heads, dim = q.shape[1:]
    size, kv_heads = cache.k.shape[1:3]
    group_size = heads // kv_heads
    is_float32 = q.dtype == torch.float32
    tile_config = tuning.attention_tile("prompt", dim, is_float32=is_float32)
    if tile_config is None and invariant:
        shared = min(tuning.shared_bytes, LARGEST_SHARED_BYTES - 1)
        tile_config = prefill_tile(dim, is_float32, shared, 0)
    elif tile_config is None:
        work_size = heads * q.shape[0]
        tile_config = prefill_tile(dim, is_float32, tuning.shared_bytes, work_size)
    lanes = min(group_size, tile_config.rows)
    tiles = work.tiles(tile_config.rows // lanes, all_tokens=invariant, without=without)
    attend_tiles[(kv_heads * -(-group_size // lanes), tiles.shape[0])](
        q, *stored(cache), table, step.positions, tiles, out, q.stride(0),
        table.shape[1], scale if cap else scale * LOG2E.value, window or 0, cap or 1.0,
        cache.scales, None, None, SIZE=size, KV_HEADS=kv_heads, GROUP=group_size,
        LANES=lanes, DIM=dim, DIM_P=max(power(dim), 16), KEYS=tile_config.keys,
        M=tile_config.rows, WINDOWED=window is not None, CAPPED=cap is not None,
        SPLIT=False, num_warps=tile_config.warps, num_stages=tile_config.stages,
    )  # fmt: skip


def _split_tiles(
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
    tuning: Tuning,
) -> None:
    """Compute the tokens of rows with several tokens over splits of their keys."""
    dim, (size, kv_heads) = q.shape[2], cache.k.shape[1:3]
    group_size = q.shape[1] // kv_heads
    tile = split_tile(q, cache, tuning)
    lanes, dim_p = min(group_size, tile.rows), max(power(dim), 16)
    head_programs = kv_heads * -(-group_size // lanes)
    spare = max(tuning.tile_waves * tuning.processors // head_programs, 1)
    items = work.tile_items(tile.rows // lanes, spare, keys=tile.keys, window=window)
    parts = items.parts * head_programs * tile.rows
    split_acc = torch.empty((parts, dim_p), dtype=torch.float32, device=q.device)
    split_stats = torch.empty((parts, 2), dtype=torch.float32, device=q.device)
    grid = (head_programs, items.entries.shape[0])
    sizes = {
        "KV_HEADS": kv_heads, "GROUP": group_size, "LANES": lanes, "DIM": dim,
        "DIM_P": dim_p, "M": tile.rows,
    }  # fmt: skip
    attend_tiles[grid](
        q, *stored(cache), table, step.positions, items.entries, out, q.stride(0),
        table.shape[1], scale if cap else scale * LOG2E.value, window or 0, cap or 1.0,
        cache.scales, split_acc, split_stats, SIZE=size, KEYS=tile.keys,
        WINDOWED=window is not None, CAPPED=cap is not None, SPLIT=True, **sizes,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    combine_tiles[grid](
        items.entries, split_acc, split_stats, out, **sizes, ROWS=MERGED_ROWS,
        SPLITS=MERGED_SPLITS, num_warps=4,
    )  # fmt: skip


def prefill_tile(
    dim: int, is_float32: bool, shared_memory: int, work: int
) -> AttentionTile:
    """Return the fastest measured tile that fits the shared memory.

    work: queries times heads of the step.
    """
    if is_float32:
        return AttentionTile(64 if dim <= 64 else 32, 16, 8, 2)
    if dim <= 64:
        return (
            AttentionTile(128, 64, 8, 2)
            if work >= LONG_WORK
            else AttentionTile(64, 64, 4, 2)
        )
    if dim <= 128 and shared_memory >= LARGEST_SHARED_BYTES:
        return LARGEST_TILE
    return AttentionTile(
        64, 64 if dim <= 128 and shared_memory >= LARGE_SHARED_BYTES else 32, 4, 2
    )


def split_tile(q: Any, cache: Any, tuning: Tuning) -> AttentionTile:
    """Return the tile of queries whose keys are split.

    The largest tiles that convert a cache in float8 have no registers left for splits.
    """
    (tokens, heads, dim), is_float32 = q.shape, dtype_name(q) == "float32"
    tile = tuning.attention_tile("prompt", dim, is_float32=is_float32)
    work = heads * tokens
    tile = tile or prefill_tile(dim, is_float32, tuning.shared_bytes, work)
    is_medium = cache.scales is not None or SHORT_WORK < work <= MEDIUM_WORK
    return AttentionTile(64, 64, 4, 3) if tile == LARGEST_TILE and is_medium else tile


def refuse_split(q: Any, cache: Any, step: Any, tuning: Tuning) -> str | None:
    """Return why the keys of tiles are not split; ``None`` if a step has few tiles."""
    if not tuning.tile_waves:
        return "not measured on this chip; tiles have all keys"
    tokens, rows = q.shape[0], step.lengths.shape[0]
    if tokens == rows or tokens <= SINGLE_TOKEN_LIMIT:
        least = SINGLE_TOKEN_LIMIT + 1
        return f"takes rows of several tokens, at least {least} in all, found {tokens}"
    kv_heads, tile = cache.k.shape[2], split_tile(q, cache, tuning)
    lanes = min(q.shape[1] // kv_heads, tile.rows)
    head_programs = kv_heads * -(-q.shape[1] // (kv_heads * lanes))
    programs = tuning.tile_waves * tuning.processors
    most = programs // head_programs * (tile.rows // lanes)
    if tokens > most:
        return f"takes {most} tokens at most, whose tiles are few, found {tokens}"
    return None


@cache
def shared_bytes(place: torch.device) -> int:
    """Most shared memory of a program; without a GPU, what every chip has."""
    if place.type != "cuda":
        return MIN_SHARED_BYTES
    return int(driver.active.utils.get_device_properties(place.index)["max_shared_mem"])


def refuse_heads(q: Any, *_: Any, tuning: Tuning, **__: Any) -> str | None:
    """Refuse heads that are too wide for tiles of queries, and unsupported dtypes."""
    if q.shape[2] > tuning.max_head_dim:
        return f"heads of {q.shape[2]} elements, takes {tuning.max_head_dim} at most"
    return refuse_dtype(q)


def _refuse_split(
    q: Any, cache: Any, step: Any, *, tuning: Tuning, **_: Any
) -> str | None:
    return refuse_heads(q, tuning=tuning) or refuse_split(q, cache, step, tuning)


def _refuse_gathered(
    q: Any, cache: Any, step: Any, *, tuning: Tuning, window: int | None = None,
    cap: float | None = None, **_: Any,
) -> str | None:  # fmt: skip
    reason = refuse_heads(q, tuning=tuning)
    return reason or refuse_long_rows(q, cache, step, window, cap, tuning)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the attention kernels, of which one is batch-invariant."""
    return (
        Kernel(
            "attention",
            "triton_rows",
            partial(attention_by_rows, tuning=tuning),
            refuse=partial(refuse_heads, tuning=tuning),
            plan=plan,
            invariant=True,
            preference=-1,
        ),
        Kernel(
            "attention",
            "triton",
            partial(attention, tuning=tuning),
            refuse=partial(refuse_heads, tuning=tuning),
            plan=plan,
            preference=PREFERENCE,
        ),
        Kernel(
            "attention",
            SPLIT,
            partial(attention, tuning=tuning, name=SPLIT),
            refuse=partial(_refuse_split, tuning=tuning),
            plan=plan,
            preference=PREFERENCE + 1,
        ),
        Kernel(
            "attention",
            GATHERED,
            partial(attention, tuning=tuning, name=GATHERED),
            refuse=partial(_refuse_gathered, tuning=tuning),
            plan=plan,
            preference=PREFERENCE + 2,
        ),
    )
