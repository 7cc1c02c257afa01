"""Rotary embedding, KV cache write and attention, for a decoding step in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.attention.attention import (
    GATHERED,
    HEADS,
    SPLIT,
    paged_attention,
    refuse_split,
)
from inl_torch.triton.attention.float8 import stored
from inl_torch.triton.attention.long_rows import refuse_long_rows
from inl_torch.triton.attention.plan import Work, plan
from inl_torch.triton.attention.rope_attend_kernels import rope_attend
from inl_torch.triton.attention.rope_write import rope_write
from inl_torch.triton.attention.row_splits import DecodeWork
from inl_torch.triton.attention.tile_splits import MERGED_SPLITS
from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.tuning import PDL_MAX_ROWS, AttentionConfig, Tuning

LABEL = "rope_attend/triton"
"""Key of the counters in ``Step.plan``."""

MIXED: Final = "triton_mixed"
"""Name of the kernel of steps with rows of several tokens."""

MAX_ROWS = 1024
"""Most rows of a decoding step whose attention is one launch."""

MAX_HEADS = 256
"""Most programs for the heads of a token."""

UNSPLIT_TILES = 3
"""Tiles of keys up to which one program is faster than a split, where there are several
rows."""

MAX_SPLITS = 32

WIDE = 64
"""Lanes of AMD's CDNA chips."""

MAX_UNLISTED_DIM = 64
"""Largest heads whose rows have a fixed number of splits: their programs are so short
that even rows lost a tenth to the list of items."""

MANY_PROGRAMS = 1024
"""Programs of one split from which memory bandwidth is the limit."""


def decode_plan(step: Step, *, block_size: int) -> DecodeWork:  # noqa: ARG001
    """Return what the layers of a decoding step share."""
    return DecodeWork(step.positions, step.used_counts[2:], MAX_HEADS)


def mixed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    tuning: Tuning, name: str,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """Rotate, write to the cache and attend, in a step with rows of several tokens."""
    work = step.plan[f"rope_attend/{name}"] if step.plan else Work(step)
    q = rope_write(q, k, v, cos, sin, cache, step.writes[group])
    out = paged_attention(
        q, cache, step, work, scale=scale, window=window, cap=cap, group=group,
        tuning=tuning, name=name,
    )  # fmt: skip
    return out, cache


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    tuning: Tuning,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """Rotate, write to the cache and attend, in a step of one token per row."""
    work = step.plan[LABEL] if step.plan else decode_plan(step, block_size=0)
    q, k, v = dense(q), dense(k), dense(v)
    tokens, heads, dim = q.shape
    (size, kv_heads), width = cache.k.shape[1:3], step.blocks.shape[2]
    group_size = heads // kv_heads
    lanes = min(power(group_size), HEADS)
    head_programs = kv_heads * -(-group_size // lanes)
    config = tuning.attend or attention_config(
        dim, q.dtype, tokens, tokens * head_programs, tuning
    )
    keys = config.keys
    programs, table = tokens * head_programs, step.blocks[group]
    listed, uses_pdl = tokens > 1 and dim > MAX_UNLISTED_DIM, tuning.uses_pdl(tokens)
    if listed:
        spare = spare_items(tokens, head_programs, tuning, config.waves)
        made = work.items(spare, keys, window, UNSPLIT_TILES)
        items = made.items.entries
        # The kernel reads them before it waits for the previous one.
        uses_pdl = uses_pdl and not made.is_new
        grid, splits = (head_programs, items.shape[0], 1), MERGED_SPLITS
        cells = items.shape[0]
    else:
        items = work.counters  # not read
        splits = split_count(programs, -(-width * size // keys), tuning, config.waves)
        grid, cells = (head_programs, tokens, splits), tokens * splits
    single, is_small = tokens == 1, tokens <= PDL_MAX_ROWS
    prefetch = is_small and not listed and q.dtype != torch.float32
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    shape = (cells, heads)
    split_acc = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    split_stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    rope_attend[grid](
        q, k, v, cos, sin, *stored(cache), table, step.rows, step.positions,
        step.starts, step.used_counts, step.writes[group], out, split_acc, split_stats,
        work.counters, items, q.stride(0), k.stride(0), v.stride(0), width,
        scale if cap else scale * LOG2E.value, window or 0, cap or 1.0, cache.scales,
        LISTED=listed, SINGLE=single, SIZE=size, KV_HEADS=kv_heads, GROUP=group_size,
        LANES=lanes, HALF=dim // 2, DIM_P=max(power(dim), 16), KEYS=keys, SPLITS=splits,
        M=max(lanes, 16), WINDOWED=window is not None, CAPPED=cap is not None,
        PDL=uses_pdl, PREFETCH=prefetch,
        UNSPLIT_TILES=1 if single else UNSPLIT_TILES, WAITS=tuning.lanes == WIDE,
        num_warps=config.warps,
        num_stages=config.stages, **({"launch_pdl": True} if uses_pdl else {}),
    )  # fmt: skip
    return out, cache


def spare_items(tokens: int, head_programs: int, tuning: Tuning, waves: int) -> int:
    """Return how many items may be cut off long rows, of all rows together.

    With one for each row, rows of even length are not cut.
    """
    return max(waves * tuning.processors // head_programs - tokens, tokens)


def split_count(programs: int, tiles: int, tuning: Tuning, waves: int) -> int:
    """Return the number of splits of a row's keys, for at most ``waves`` programs per
    multiprocessor.

    One split too many costs more than one too few, since a program without keys still
    occupies a multiprocessor.
    """
    target = max(waves * tuning.processors // programs, 1)
    return min(1 << target.bit_length() - 1, MAX_SPLITS, power(tiles))


def attention_config(
    dim: int, dtype: torch.dtype, tokens: int, programs: int, tuning: Tuning
) -> AttentionConfig:
    """Return the launch parameters of the chip's table, or as measured on an H200.

    programs: their number without splits. A few programs are limited by latency and
    need many keys in flight; many small programs reach the memory bandwidth, also where
    the lengths of rows differ.
    """
    tile = tuning.attention_tile("decode", dim, is_float32=dtype == torch.float32)
    if tile is not None:
        return AttentionConfig(tile.keys, 2, tile.warps, tile.stages)
    if dtype == torch.float32:
        return (
            AttentionConfig(32, 2, 8, 2) if dim > 64 else AttentionConfig(64, 2, 4, 2)
        )
    if dim > 64:
        if tokens > 1:
            return AttentionConfig(16, 8, 1 if dim <= 128 else 2, 3)
        return (
            AttentionConfig(32, 2, 2, 2) if dim <= 128 else AttentionConfig(64, 2, 8, 2)
        )
    if tokens == 1:
        return AttentionConfig(64, 2, 4, 2)
    if tokens <= PDL_MAX_ROWS:
        return AttentionConfig(128, 4, 4, 2)
    if programs >= MANY_PROGRAMS:
        return AttentionConfig(32, 8, 1, 2)
    return AttentionConfig(64, 8, 4, 2)


def refuse_heads(q: Any, tuning: Tuning) -> str | None:
    """Refuse heads that the kernels of this module do not support."""
    most = tuning.max_head_dim
    if q.shape[2] > most or q.shape[2] % 2:
        return f"heads of {q.shape[2]} elements, takes even sizes up to {most}"
    if q.shape[1] > MAX_HEADS:
        return f"takes {MAX_HEADS} heads at most, found {q.shape[1]}"
    return refuse_dtype(q)


def _refuse_decode(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, _cache: Any, step: Any, *,
    tuning: Tuning, **_: Any,
) -> str | None:  # fmt: skip
    tokens, rows = q.shape[0], step.lengths.shape[0]
    if tokens != rows:
        return f"takes one token per row, found {tokens} tokens of {rows} rows"
    if tokens > MAX_ROWS:
        return f"takes {MAX_ROWS} rows at most, found {tokens}"
    return refuse_heads(q, tuning)


def _refuse_mixed(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, _cache: Any, step: Any, *,
    tuning: Tuning, **_: Any,
) -> str | None:  # fmt: skip
    if q.shape[0] == step.lengths.shape[0]:
        return "takes rows of several tokens"
    return refuse_heads(q, tuning)


def _refuse_split(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, cache: Any, step: Any, *,
    tuning: Tuning, **_: Any,
) -> str | None:  # fmt: skip
    return refuse_heads(q, tuning) or refuse_split(q, cache, step, tuning)


def _refuse_gathered(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, cache: Any, step: Any, *,
    tuning: Tuning, window: int | None = None, cap: float | None = None, **_: Any,
) -> str | None:  # fmt: skip
    reason = refuse_long_rows(q, cache, step, window, cap, tuning)
    return reason or refuse_heads(q, tuning)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels of decoding steps, of others, and of others with few tiles and
    with long rows.
    """
    yield Kernel(
        "rope_attend",
        "triton",
        partial(decode_attention, tuning=tuning),
        refuse=partial(_refuse_decode, tuning=tuning),
        plan=decode_plan,
        preference=PREFERENCE,
    )
    yield Kernel(
        "rope_attend",
        MIXED,
        partial(mixed_attention, tuning=tuning, name=MIXED),
        refuse=partial(_refuse_mixed, tuning=tuning),
        plan=plan,
        preference=PREFERENCE,
    )
    yield Kernel(
        "rope_attend",
        SPLIT,
        partial(mixed_attention, tuning=tuning, name=SPLIT),
        refuse=partial(_refuse_split, tuning=tuning),
        plan=plan,
        preference=PREFERENCE + 1,
    )
    yield Kernel(
        "rope_attend",
        GATHERED,
        partial(mixed_attention, tuning=tuning, name=GATHERED),
        refuse=partial(_refuse_gathered, tuning=tuning),
        plan=plan,
        preference=PREFERENCE + 2,
    )
