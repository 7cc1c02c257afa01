"""Attention of a step of one row: cuDNN for the chunk, then the cached prefix.

The attention of a chunk to itself is one cuDNN call. The keys of earlier steps are then
copied from the cache to a dense buffer, since tiles of contiguous keys are loaded by
the chip's copy engine at almost twice the rate of keys in blocks, and their attention
is merged by the log-sum-exp of the scores. cuDNN computes that only for lengths that
the host knows, and a captured graph serves every length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.attention.cache import write_kv
from inl_torch.triton.attention.rope import rope
from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.common import (
    PREFERENCE,
    dense,
    dtype_name,
    power,
    refuse_row,
)

MIN_TOKENS = 1024
"""Fewest tokens for which cuDNN is faster."""

TILE_TOKENS = 128
"""Tokens of a program, which computes one head."""

KEYS = 128
"""Keys per tile."""

GATHERED_KEYS = 1 << 15
"""Most keys in the buffer: 128 MiB for 8 heads of 128 elements in 16 bits."""


DIM = 128
"""Size of heads."""


def refuse_prompt(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, cache: Any, step: Any, *,
    window: int | None = None, cap: float | None = None, **_: Any,
) -> str | None:  # fmt: skip
    """Return why cuDNN does not support this attention, or is slower than Triton.

    Not with a cache in float8, whose keys the step rounds before it attends to them.
    """
    tokens, rows = q.shape[0], step.lengths.shape[0]
    if rows != 1 or tokens < MIN_TOKENS:
        return f"takes one row of {MIN_TOKENS} tokens, found {tokens} of {rows} rows"
    if dtype_name(q) != "bfloat16" or cache.scales is not None:
        return "takes bfloat16 and a cache of the same dtype"
    if q.shape[2] != DIM:
        return f"takes heads of {DIM} elements, found {q.shape[2]}"
    if window is not None or cap is not None:
        return "takes no window and no cap"
    return refuse_row(q, power(q.shape[1]) * power(DIM // 2))


@triton.jit
def gather_keys(
    k_cache: tensor, v_cache: tensor, table: tensor, positions: tensor, keys: tensor,
    values: tensor, first: tensor, capacity: tensor, SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the row's cached keys and values from ``first`` on: [kv_heads, capacity, d].

    The last tile of ``KEYS`` is padded with zeros; tiles behind it stay undefined.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    last = tl.load(positions).to(tl.int32) - first
    if tl.program_id(1) * KEYS >= last:
        return
    valid = key < last
    block = tl.load(table + (first + key) // SIZE, mask=valid, other=0).to(tl.int64)
    slot = (block * SIZE + (first + key) % SIZE) * KV_HEADS + kv_head
    d = tl.arange(0, DIM)
    source = slot[:, None] * DIM + d[None, :]
    target = (kv_head * capacity + key)[:, None] * DIM + d[None, :]
    tl.store(keys + target, tl.load(k_cache + source, mask=valid[:, None], other=0))
    tl.store(values + target, tl.load(v_cache + source, mask=valid[:, None], other=0))


@triton.jit
def attend_gathered(
    q: tensor, keys: tensor, values: tensor, positions: tensor, starts: tensor,
    lse: tensor, out: tensor, first: tensor, capacity: tensor, tokens: tensor,
    scale: tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, M: tl.constexpr,
) -> None:  # fmt: skip
    """Merge attention to gathered keys, which all precede the row, into ``out``.

    keys, values: tensor descriptors of [kv_heads * capacity, d]. lse: [heads, tokens]
    natural log-sum-exp of the scores behind ``out``; updated. Padding becomes 0.
    """
    head = tl.program_id(0)
    token = tl.program_id(1) * M + tl.arange(0, M)
    used = tl.load(starts + 1).to(tl.int32)
    # The row's cached tokens in this buffer.
    last = tl.minimum(tl.load(positions).to(tl.int32) - first, capacity)
    if (last <= 0) & (tl.program_id(1) * M + M <= used):
        return
    is_token, inside = token < used, token < tokens
    d, key = tl.arange(0, DIM), tl.arange(0, KEYS)
    cells = (token.to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * DIM + d[None, :]
    x = tl.load(q + cells, mask=is_token[:, None], other=0)
    acc = tl.load(out + cells, mask=is_token[:, None], other=0).to(tl.float32)
    m_i = tl.load(lse + head * tokens + token, mask=is_token, other=0) * LOG2E
    l_i = tl.full((M,), 1.0, tl.float32)
    row = (head // GROUP) * capacity
    full_tiles = last // KEYS * KEYS
    for start in range(0, full_tiles, KEYS):
        m_i, l_i, acc = accumulate_gathered(
            x, keys.load([row + start, 0]), values.load([row + start, 0]), None, scale,
            m_i, l_i, acc, False,
        )  # fmt: skip
    if full_tiles < last:
        at = row + full_tiles
        m_i, l_i, acc = accumulate_gathered(
            x, keys.load([at, 0]), values.load([at, 0]),
            (full_tiles + key < last)[None, :], scale, m_i, l_i, acc, True,
        )  # fmt: skip
    acc = tl.where(is_token[:, None], acc / l_i[:, None], 0.0)
    tl.store(out + cells, acc, mask=inside[:, None])
    tl.store(lse + head * tokens + token, m_i / LOG2E + tl.log(l_i), mask=is_token)


@triton.jit
def accumulate_gathered(
    x: tensor, key: tensor, value: tensor, visible: tensor, scale: tensor, m_i: tensor,
    l_i: tensor, acc: tensor, MASKED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Accumulate one tile of keys: the new maximum, sum and accumulator."""
    score = tl.dot(x, tl.trans(key))
    if MASKED:
        score = tl.where(visible, score, -1e30)
    m_new = tl.maximum(m_i, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - m_new[:, None])
    rescale = tl.exp2(m_i - m_new)
    acc = tl.dot(p.to(value.dtype), value, acc=acc * rescale[:, None])
    return m_new, l_i * rescale + tl.sum(p, 1), acc


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, step: Step, *,
    scale: float, group: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of the tokens of one row: [T, heads, d].

    q, k: rotated. k, v: also written to the cache already.
    """
    out, lse = attend_self(q, k, v, scale)
    out, lse = out.contiguous(), lse.contiguous()
    _attend_cached(dense(q), cache, step, lse, out, scale=scale, group=group)
    return out


def rope_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
    window: int | None = None, cap: float | None = None,  # noqa: ARG001 - refused
    group: int = 0,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """Rotate, write to the cache and attend: the attention of the chunk is cuDNN's."""
    q, k = rope(q, k, cos, sin)
    cache = write_kv(k, v, cache, step.writes[group])
    return attend_prompt(q, k, v, cache, step, scale=scale, group=group), cache


CUDNN_KERNELS = (
    Kernel(
        "rope_attend",
        "triton+cudnn",
        rope_attend,
        refuse=refuse_prompt,
        preference=PREFERENCE + 3,
    ),
)
"""For chips of compute capability 9.0, on which cuDNN was measured."""


def _attend_cached(
    q: torch.Tensor, cache: Cache, step: Step, lse: torch.Tensor, out: torch.Tensor, *,
    scale: float, group: int,
) -> None:  # fmt: skip
    """Merge attention to the keys cached before the row's first token into ``out``."""
    tokens, heads, dim = q.shape
    size, kv_heads = cache.k.shape[1:3]
    table = step.blocks[group].contiguous()
    longest = max(table.shape[1] * size - tokens, 1)
    capacity = min(-(-longest // KEYS) * KEYS, GATHERED_KEYS)
    shape = (2, kv_heads * capacity, dim)
    buffers = torch.empty(shape, dtype=q.dtype, device=q.device)
    keys, values = (TensorDescriptor.from_tensor(x, [KEYS, dim]) for x in buffers)
    for first in range(0, longest, capacity):
        gather_keys[(kv_heads, capacity // KEYS)](
            cache.k, cache.v, table, step.positions, *buffers, first, capacity,
            SIZE=size, KV_HEADS=kv_heads, DIM=dim, KEYS=KEYS, num_warps=8,
        )  # fmt: skip
        attend_gathered[(heads, triton.cdiv(tokens, TILE_TOKENS))](
            q, keys, values, step.positions, step.starts, lse, out, first, capacity,
            tokens, scale * LOG2E.value, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
            DIM=dim, KEYS=KEYS, M=TILE_TOKENS, num_warps=8, num_stages=3,
        )  # fmt: skip
