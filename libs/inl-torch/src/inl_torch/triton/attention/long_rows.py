"""Attention of the long rows of a step, over keys that are gathered first.

Keys and values of rows with many new tokens are copied from the blocks of the cache to
a dense buffer, whose tiles the copy engine of the chip loads. The rows are found on the
device, so that a captured graph serves steps with several, one or none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_torch.triton.attention.float8 import from_cache, stored, times
from inl_torch.triton.attention.prompt import KEYS, TILE_TOKENS, accumulate_gathered
from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.common import dtype_name
from inl_torch.triton.tuning import Tuning

BUFFER_BYTES = 1 << 28
"""Most bytes of gathered keys and values: 65,536 keys of 8 heads of 128 in 16 bits."""

DIMS = (64, 128)
"""Sizes of heads whose tiles fit the shared memory of the chip."""


class LongRowLimits(NamedTuple):
    """Which rows of a step are long, and how many of their keys can be gathered."""

    tokens: int
    """Fewest new tokens of a long row."""
    rows: int
    """Most long rows that the tokens of the step allow."""
    key_tiles: int
    """Tiles of ``KEYS`` keys that the buffer holds."""


class LongRows(NamedTuple):
    """Work lists of the long rows of a step."""

    is_long: torch.Tensor
    """bool [R]."""
    first_tiles: torch.Tensor
    """int32 [R]: first tile of the row's keys in the buffer."""
    key_tiles: torch.Tensor
    """int32 [tiles, 2]: row of each tile of the buffer (-1 if unused), first key."""
    query_tiles: torch.Tensor
    """int32 [tiles, 3]: row, first token and number of tokens, 0 if unused."""


def refuse_long_rows(
    q: Any, cache: Any, step: Any, window: int | None, cap: float | None,
    tuning: Tuning,
) -> str | None:  # fmt: skip
    """Return why no keys are gathered; ``None`` if a step may have long rows."""
    fewest, context = tuning.long_row_tokens, step.blocks.shape[2] * cache.k.shape[1]
    if not fewest:
        return "the copy engine of the chip loads no tiles"
    if min(q.shape[0], context) < fewest:
        return f"takes rows of {fewest} new tokens, found {min(q.shape[0], context)}"
    if q.shape[0] == step.lengths.shape[0]:
        return "takes rows of several tokens"
    if window is not None or cap is not None:
        return "takes no window and no cap"
    if q.shape[2] not in DIMS or dtype_name(q) == "float32":
        return f"takes heads of {DIMS} elements of 16 bits"
    return None


def long_row_limits(
    q: torch.Tensor, cache: Cache, step: Step, tuning: Tuning
) -> LongRowLimits:
    """Return the limits of the long rows of a step that may have some."""
    (tokens, _, dim), (size, kv_heads) = q.shape, cache.k.shape[1:3]
    fewest, context = tuning.long_row_tokens, step.blocks.shape[2] * size
    rows = min(tokens // fewest, step.lengths.shape[0])
    most = BUFFER_BYTES // (2 * KEYS * kv_heads * dim * q.itemsize)
    return LongRowLimits(fewest, rows, min(rows * triton.cdiv(context, KEYS), most))


@triton.jit
def gather_long_rows(
    k_cache: tensor, v_cache: tensor, table: tensor, lengths: tensor, key_tiles: tensor,
    keys: tensor, values: tensor, width: tensor, capacity: tensor, SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Copy one tile of one head: [kv_heads, capacity, d].

    The last tile of a row is padded with zeros; unused tiles stay undefined.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(key_tiles + tile * 2).to(tl.int64)
    if row < 0:
        return
    n, d = tl.arange(0, KEYS), tl.arange(0, DIM)
    key = tl.load(key_tiles + tile * 2 + 1) + n
    valid = key < tl.load(lengths + row)
    block = tl.load(table + row * width + key // SIZE, mask=valid, other=0)
    slot = (block.to(tl.int64) * SIZE + key % SIZE) * KV_HEADS + kv_head
    source = slot[:, None] * DIM + d[None, :]
    target = (kv_head * capacity + tile * KEYS + n)[:, None] * DIM + d[None, :]
    half: tl.constexpr = keys.dtype.element_ty
    key = from_cache(tl.load(k_cache + source, mask=valid[:, None], other=0), half)
    tl.store(keys + target, key)
    value = from_cache(tl.load(v_cache + source, mask=valid[:, None], other=0), half)
    tl.store(values + target, value)


@triton.jit
def attend_long_rows(
    q: tensor, keys: tensor, values: tensor, positions: tensor, query_tiles: tensor,
    first_tiles: tensor, out: tensor, q_stride: tensor, capacity: tensor,
    scale: tensor, scales: tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, KEYS: tl.constexpr, M: tl.constexpr,
) -> None:  # fmt: skip
    """Causal attention of one head of one tile of queries.

    keys, values: tensor descriptors of [kv_heads * capacity, d].
    """
    head = tl.program_id(0)
    tile = query_tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count == 0:
        return
    query, d, key = tl.arange(0, M), tl.arange(0, DIM), tl.arange(0, KEYS)
    is_token = (query < count)[:, None]
    first = tl.load(tile + 1).to(tl.int64)
    token = first + query
    offsets = token[:, None] * q_stride + head * DIM + d[None, :]
    x = tl.load(q + offsets, mask=is_token, other=0)
    begin = tl.load(positions + first).to(tl.int32)
    position = (begin + query)[:, None]
    base = (head // GROUP) * capacity + tl.load(first_tiles + tl.load(tile)) * KEYS
    scale = times(scale, scales, 0)
    m_i = tl.full((M,), -1e30, tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DIM), tl.float32)
    # Keys before this one are visible to every query of the tile.
    first_masked = (begin + 1) // KEYS * KEYS
    for start in range(0, first_masked, KEYS):
        m_i, l_i, acc = accumulate_gathered(
            x, keys.load([base + start, 0]), values.load([base + start, 0]), None,
            scale, m_i, l_i, acc, False,
        )  # fmt: skip
    for start in range(first_masked, begin + count, KEYS):
        m_i, l_i, acc = accumulate_gathered(
            x, keys.load([base + start, 0]), values.load([base + start, 0]),
            (start + key)[None, :] <= position, scale, m_i, l_i, acc, True,
        )  # fmt: skip
    acc = times(acc / l_i[:, None], scales, 1)
    cells = (token * (KV_HEADS * GROUP) + head)[:, None] * DIM + d[None, :]
    tl.store(out + cells, acc, mask=is_token)


def attend_rows_apart(
    q: torch.Tensor, cache: Cache, step: Step, table: torch.Tensor,
    long_rows: LongRows, out: torch.Tensor, *, scale: float,
) -> None:  # fmt: skip
    """Write the attention of the tokens of ``long_rows`` to ``out``: [T, heads, d]."""
    heads, dim = q.shape[1:]
    size, kv_heads = cache.k.shape[1:3]
    key_tiles = long_rows.key_tiles.shape[0]
    capacity = key_tiles * KEYS
    shape = (2, kv_heads * capacity, dim)
    buffers = torch.empty(shape, dtype=q.dtype, device=q.device)
    gather_long_rows[(kv_heads, key_tiles)](
        *stored(cache), table, step.lengths, long_rows.key_tiles, *buffers,
        table.shape[1], capacity, SIZE=size, KV_HEADS=kv_heads, DIM=dim, KEYS=KEYS,
        num_warps=8,
    )  # fmt: skip
    keys, values = (TensorDescriptor.from_tensor(x, [KEYS, dim]) for x in buffers)
    attend_long_rows[(heads, long_rows.query_tiles.shape[0])](
        q, keys, values, step.positions, long_rows.query_tiles, long_rows.first_tiles,
        out, q.stride(0), capacity, scale * LOG2E.value, cache.scales,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, KEYS=KEYS, M=TILE_TOKENS,
        num_warps=8, num_stages=3,
    )  # fmt: skip
