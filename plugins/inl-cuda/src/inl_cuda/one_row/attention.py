"""Attention of one token in one launch, whose programs share memory in clusters."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_cuda.one_row.compiler import POINTER, Function, aligned, function_of
from inl_torch.triton.attention.rope_attend import MAX_HEADS
from inl_torch.triton.common import dense, dtype_name

NUMBERS: Final = ctypes.c_int, ctypes.c_float, ctypes.c_int, ctypes.c_float
TYPES: Final = (*[POINTER] * 12, *NUMBERS)
LOG2E: Final = 1.4426950408889634
DTYPES: Final = ("bfloat16", "float16")

DIMS: Final = (64, 128)
"""Sizes of heads whose results registers hold."""

TILE: Final = 16
"""Keys that are multiplied at a time, which lie in one block."""

MOST_HEADS: Final = 8
"""Most heads that share keys: half a tile of the matrix units."""

THREADS: Final = 128

RANKS: Final = 16
"""Programs of a cluster."""

PORTABLE_RANKS: Final = 8
"""Programs of a cluster on chips that have no room for the former."""

FEWEST_CLUSTERS: Final = 3
"""Fewer clusters leave most of a chip idle where there are many keys."""


def refuse(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, cache: Any, step: Any, **_: Any
) -> str | None:
    """Return why the kernel does not compute the attention of a step, if it does not.

    q: [T, heads, d].
    """
    (tokens, heads, dim), (size, kv_heads) = q.shape, cache.k.shape[1:3]
    if tokens != 1 or step.lengths.shape[0] != 1:
        return f"takes 1 token, found {tokens}"
    if dtype_name(q) not in DTYPES or dtype_name(cache.k) != dtype_name(q):
        return f"takes {' and '.join(DTYPES)}, and a cache of the same dtype"
    if dim not in DIMS:
        return f"takes heads of {DIMS} elements, found {dim}"
    if heads // kv_heads > MOST_HEADS or heads > MAX_HEADS:
        return f"takes {MOST_HEADS} heads of the same keys, found {heads // kv_heads}"
    if kv_heads < FEWEST_CLUSTERS:
        return f"takes {FEWEST_CLUSTERS} heads of keys or more, found {kv_heads}"
    return (
        f"takes blocks of a multiple of {TILE}, found {size}" if size % TILE else None
    )


def rope_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0, pdl: bool,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """Rotate, write to the cache and attend: [1, heads, d].

    Heads of a token are adjacent. The previous kernel must not write the arrays of the
    step, nor the cache, if ``pdl``.
    """
    q, k, v = dense(q), dense(k), dense(v)
    _, heads, dim = q.shape
    (size, kv_heads), table = cache.k.shape[1:3], step.blocks[group]
    writes = step.writes[group]
    options = {
        "D": dim, "GROUP": heads // kv_heads, "SIZE": size, "THREADS": THREADS,
        "BFLOAT16": int(q.dtype == torch.bfloat16),
        "WINDOWED": int(window is not None), "CAPPED": int(cap is not None),
        "WIDE_POSITIONS": is_wide(step.positions), "WIDE_TABLE": is_wide(table),
        "WIDE_WRITES": is_wide(writes), "WIDE_COUNTS": is_wide(step.used_counts),
        "PDL": int(pdl),
    }  # fmt: skip
    function, ranks = kernel_of(options, q.device)
    out = torch.empty_like(q)
    tensors = (
        aligned(q), aligned(k), aligned(v), cos, sin, cache.k, cache.v, table,
        step.positions, step.used_counts, writes, out,
    )  # fmt: skip
    numbers = kv_heads, scale if cap else scale * LOG2E, window or 0, cap or 1.0
    function.launch(
        ranks * kv_heads, THREADS, 0,
        (*(each.data_ptr() for each in tensors), *numbers), cluster=ranks, pdl=pdl,
    )  # fmt: skip
    return out, cache


def kernel_of(options: dict[str, int], place: torch.device) -> tuple[Function, int]:
    """Return the kernel, and the programs of its clusters."""
    for ranks in (RANKS, PORTABLE_RANKS):
        given = tuple({**options, "RANKS": ranks}.items())
        function = function_of("attention.cu", "attend_one", TYPES, given, place)
        if ranks == PORTABLE_RANKS or function.allow_cluster(ranks, THREADS):
            break
    return function, ranks


def is_wide(indices: torch.Tensor) -> int:
    """Return 1 for int64, 0 for int32."""
    return int(indices.dtype == torch.int64)
