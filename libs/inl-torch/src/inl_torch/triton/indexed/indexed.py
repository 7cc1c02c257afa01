"""Launches of sparse attention by an indexer.

Scores are computed for the keys that a token sees; a library selects the highest. A
token's chosen latents are divided between programs, more of them for few tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.sparse_attention import highest
from inl_torch.triton.common import PREFERENCE, dense, dtype_name, power, refuse_dtype
from inl_torch.triton.indexed.kernels import attend_chosen, combine_parts, score_keys

KEYS = 64
"""Cached tokens of a tile of scores."""
MOST = 1 << 27
"""Scores that are held at once, about."""
HEADS = 16
"""Query heads of a tile of attention."""
PROGRAMS = 256
"""Programs of attention, about, for few tokens."""
LEAST = 16
"""Fewest elements of an axis of a product."""


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    k: int,
    group: int,
) -> torch.Tensor:
    q, weights, table = dense(q), dense(weights), step.blocks[group]
    (tokens, heads, lanes), size = q.shape, cache.k.shape[1]
    width = table.shape[1] * size
    part = max(1, min(tokens, MOST // width))
    # Products of float32, which have no tensor cores, keep their operands in registers.
    exact = q.dtype == torch.float32
    keys = 16 if exact else KEYS
    found = []
    for first in range(0, tokens, part):
        count = min(part, tokens - first)
        scores = torch.empty((count, width), dtype=torch.float32, device=q.device)
        score_keys[(count, -(-width // keys))](
            q, weights, cache.k, scores, table, step.rows, step.positions,
            step.used_counts, first, q.stride(0), weights.stride(0), table.stride(0),
            width, heads, lanes, cache.k.shape[-1], size,
            HEADS=max(power(heads), LEAST), LANES=max(power(lanes), LEAST), KEYS=keys,
            num_warps=8 if exact else 4,
        )  # fmt: skip
        found.append(highest(scores, k))
    return found[0] if len(found) == 1 else torch.cat(found)


def sparse_attention(
    q: torch.Tensor,
    ids: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    group: int,
) -> torch.Tensor:
    q, table = dense(q), step.blocks[group]
    (tokens, heads, width), count = q.shape, ids.shape[1]
    small = q.dtype == torch.float32 or torch.version.hip is not None
    tiles, keys = -(-heads // HEADS), 16 if small else 32
    parts = max(1, min(PROGRAMS // (tokens * tiles), -(-count // 64)))
    split = -(-count // (parts * keys)) * keys
    parts = -(-count // split)
    wide = power(width + 1) // 2
    options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    sums = torch.empty((parts, tokens, heads, width), **options)
    top, total = torch.empty((2, parts, tokens, heads), **options)
    attend_chosen[(tokens, tiles, parts)](
        q, ids, cache.v, sums, top, total, table, step.rows, step.used_counts, scale,
        q.stride(0), table.stride(0), heads, width, count, cache.v.shape[1], tokens,
        SPLIT=split, HEADS=HEADS, WIDE=wide, REST=max(power(width - wide), LEAST),
        KEYS=keys, num_warps=8, num_stages=1,
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    combine_parts[(tokens * heads,)](
        out, sums, top, total, heads, width, tokens, PARTS=parts, LANES=power(width),
    )  # fmt: skip
    return out


def _refuse_topk(q: Any, _weights: Any, cache: Any, *_: Any, **__: Any) -> str | None:
    return _refuse(q, cache.k)


def _refuse_attention(q: Any, _ids: Any, cache: Any, *_: Any, **__: Any) -> str | None:
    if q.shape[-1] < LEAST:
        return f"latents of {q.shape[-1]} lanes, takes {LEAST} at least"
    if torch.version.hip is not None and dtype_name(q) == "float32":
        return "sums of float32 do not fit the registers of AMD's chips"
    return _refuse(q, cache.v)


def _refuse(q: Any, stored: Any) -> str | None:
    return refuse_dtype(q) or refuse_dtype(stored)


KERNELS = (
    Kernel(
        "index_topk", "triton+eager", index_topk, refuse=_refuse_topk,
        preference=PREFERENCE,
    ),
    Kernel(
        "sparse_attention", "triton", sparse_attention, refuse=_refuse_attention,
        preference=PREFERENCE,
    ),
)  # fmt: skip
