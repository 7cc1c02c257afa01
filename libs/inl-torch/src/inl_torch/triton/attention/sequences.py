"""Attention within whole sequences, in both directions: for encoders.

A program computes a tile of queries of one head over the keys of their sequences only,
whose bounds it searches on the device: nothing is padded to the longest sequence, and
there is no mask in memory. Exponentials have base 2, with log2(e) as a part of the
scale.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.full_attention import DistanceBias
from inl.spec.kernel import Kernel
from inl_torch.triton.attention.attention import (
    LARGEST_SHARED_BYTES,
    prefill_tile,
    refuse_heads,
)
from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.common import (
    PREFERENCE,
    dense,
    power,
    spread,
)
from inl_torch.triton.tuning import AttentionTile, Tuning

LEAST: Final = 16
"""Fewest elements of an axis of a product."""

NO_REST = tl.constexpr(LEAST)
"""Elements of the accumulator that stands for one that there is not."""

FAST, FAST_WIDE = AttentionTile(128, 64, 4, 3), AttentionTile(128, 64, 8, 3)
"""Tiles of chips that multiply from shared memory: heads of up to 96 elements, whose
parts fit the registers of 4 warps, as measured on an H100; and larger ones."""


@triton.jit
def accumulate_keys(
    x: tensor, x_rest: tensor, k: tensor, v: tensor, bias: tensor, token: tensor,
    key: tensor, begin: tensor, end: tensor, stop: tensor, k_stride: tensor,
    v_stride: tensor, scale: tensor, bias_stride: tensor, most: tensor, m_i: tensor,
    l_i: tensor, acc: tensor, acc_rest: tensor, DIM: tl.constexpr, LOW: tl.constexpr,
    REST: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr,
) -> tuple[tensor, tensor, tensor, tensor]:  # fmt: skip
    """Accumulate one tile of keys: the new maximum, sum and accumulators."""
    d = tl.arange(0, LOW)
    at_k, at_v = key.to(tl.int64)[:, None] * k_stride, key.to(tl.int64)[:, None]
    at_v = at_v * v_stride
    inside = (key < stop)[:, None]
    if MASKED or LOW > DIM:
        both = inside & (d < DIM)[None, :]
        k_low = tl.load(k + at_k + d[None, :], mask=both, other=0)
        v_low = tl.load(v + at_v + d[None, :], mask=both, other=0)
    else:
        k_low = tl.load(k + at_k + d[None, :])
        v_low = tl.load(v + at_v + d[None, :])
    score = tl.dot(x, tl.trans(k_low), input_precision="ieee")
    if REST:
        rest = LOW + tl.arange(0, REST)
        both = (rest < DIM)[None, :]
        if MASKED:
            both = both & inside
        k_rest = tl.load(k + at_k + rest[None, :], mask=both, other=0)
        v_rest = tl.load(v + at_v + rest[None, :], mask=both, other=0)
        score = tl.dot(x_rest, tl.trans(k_rest), acc=score, input_precision="ieee")
    if BIASED:
        distance = key[None, :] - token[:, None]
        distance = tl.minimum(tl.maximum(distance, -most), most) + most
        added = tl.load(bias + distance * bias_stride).to(tl.float32)
        score = score * scale + added * LOG2E
        scale = 1.0
    if MASKED:
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        score = tl.where(visible, score, float("-inf"))
    # The maximum of a tile whose keys are all masked stays finite.
    m_new = tl.maximum(m_i, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - m_new[:, None])
    rescale = tl.exp2(m_i - m_new)
    l_i = l_i * rescale + tl.sum(p, 1)
    p = p.to(v_low.dtype)
    acc = tl.dot(p, v_low, acc=acc * rescale[:, None], input_precision="ieee")
    if REST:
        acc_rest = acc_rest * rescale[:, None]
        acc_rest = tl.dot(p, v_rest, acc=acc_rest, input_precision="ieee")
    return m_new, l_i, acc, acc_rest


@triton.jit
def attend_sequences(
    q: tensor, k: tensor, v: tensor, starts: tensor, bias: tensor, out: tensor,
    tokens: tensor, count: tensor, q_stride: tensor, k_stride: tensor, v_stride: tensor,
    scale: tensor, window: tensor, bias_stride: tensor, most: tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, LOW: tl.constexpr,
    REST: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    WINDOWED: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of a tile of tokens of one head.

    starts: bounds of ``count`` sequences, which are searched in ``STEPS`` steps. bias:
    [2 most + 1, heads] with ``BIASED``. The ``DIM`` elements of a head are ``LOW``, a
    power of two, and ``REST`` more, with padding. With ``SPLIT``, keys that all queries
    of a tile see are computed without a mask. Tokens of no sequence become 0.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * M + tl.arange(0, M)
    low, high = tl.zeros((M,), tl.int32), tl.zeros((M,), tl.int32) + count
    for _ in range(STEPS):
        middle, is_open = (low + high) // 2, low < high
        bound = tl.load(starts + 1 + middle, mask=is_open, other=0)
        low, high = (
            tl.where(is_open & (bound <= token), middle + 1, low),
            tl.where(is_open & (bound > token), middle, high),
        )
    is_used = low < count
    begin = tl.load(starts + low, mask=is_used, other=tokens)
    end = tl.load(starts + low + 1, mask=is_used, other=0)
    if WINDOWED:
        begin = tl.maximum(begin, token - window)
        end = tl.minimum(end, token + window + 1)
    first, stop = tl.min(begin, 0), tl.max(end, 0)
    d, key = tl.arange(0, LOW), tl.arange(0, KEYS)
    cells = token.to(tl.int64)[:, None]
    q_at = q + cells * q_stride + head * DIM
    x = tl.load(q_at + d[None, :], mask=is_used[:, None] & (d < DIM)[None, :], other=0)
    x_rest, acc_rest = x, tl.zeros((M, NO_REST), tl.float32)
    if REST:
        rest = LOW + tl.arange(0, REST)
        has_rest = is_used[:, None] & (rest < DIM)[None, :]
        x_rest = tl.load(q_at + rest[None, :], mask=has_rest, other=0)
        acc_rest = tl.zeros((M, REST), tl.float32)
    k += (head // GROUP) * DIM
    v += (head // GROUP) * DIM
    if BIASED:
        bias += head
    m_i = tl.full((M,), -1e30, tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, LOW), tl.float32)
    if SPLIT:
        # Keys in this range are visible to every query of the tile.
        full = first + (tl.max(begin, 0) - first + KEYS - 1) // KEYS * KEYS
        full_stop = full + tl.maximum(tl.min(end, 0) - full, 0) // KEYS * KEYS
        for start in range(first, tl.minimum(full, stop), KEYS):
            m_i, l_i, acc, acc_rest = accumulate_keys(
                x, x_rest, k, v, bias, token, start + key, begin, end, stop, k_stride,
                v_stride, scale, bias_stride, most, m_i, l_i, acc, acc_rest, DIM, LOW,
                REST, True, BIASED,
            )  # fmt: skip
        for start in range(full, full_stop, KEYS):
            m_i, l_i, acc, acc_rest = accumulate_keys(
                x, x_rest, k, v, bias, token, start + key, begin, end, stop, k_stride,
                v_stride, scale, bias_stride, most, m_i, l_i, acc, acc_rest, DIM, LOW,
                REST, False, BIASED,
            )  # fmt: skip
        first = full_stop
    for start in range(first, stop, KEYS):
        m_i, l_i, acc, acc_rest = accumulate_keys(
            x, x_rest, k, v, bias, token, start + key, begin, end, stop, k_stride,
            v_stride, scale, bias_stride, most, m_i, l_i, acc, acc_rest, DIM, LOW, REST,
            True, BIASED,
        )  # fmt: skip
    total = tl.where(l_i > 0, l_i, 1)[:, None]
    is_token = (token < tokens)[:, None]
    out_at = out + (cells * HEADS + head) * DIM
    tl.store(out_at + d[None, :], acc / total, mask=is_token & (d < DIM)[None, :])
    if REST:
        rest = LOW + tl.arange(0, REST)
        tl.store(
            out_at + rest[None, :], acc_rest / total,
            mask=is_token & (rest < DIM)[None, :],
        )  # fmt: skip


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *,
    scale: float, window: int | None, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return _attend(q, k, v, starts, None, scale, window, tuning)


def biased_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor,
    w: DistanceBias, *, scale: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return _attend(q, k, v, starts, w.weight, scale, None, tuning)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, bias: Any,
    scale: float, window: int | None, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    q, k, v = map(dense, (q, k, v))
    tokens, heads, dim = q.shape
    count = starts.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tile = sequence_tile(
        dim, tuning, is_float32=q.dtype == torch.float32, is_biased=bias is not None
    )
    low, rest = parts_of(dim)
    most, bias_stride = (0, 0) if bias is None else (bias.shape[0] // 2, heads)
    bias = None if bias is None else bias.contiguous()
    attend_sequences[(triton.cdiv(tokens, tile.rows), heads)](
        q, k, v, starts, bias, out, tokens, count, q.stride(0), k.stride(0),
        v.stride(0), scale * LOG2E.value, window or 0, bias_stride, most, HEADS=heads,
        GROUP=heads // k.shape[1], DIM=dim, LOW=low, REST=rest, M=tile.rows,
        KEYS=tile.keys, STEPS=count.bit_length(), WINDOWED=window is not None,
        BIASED=bias is not None, SPLIT=q.dtype != torch.float32,
        num_warps=spread(tile.warps, q), num_stages=tile.stages,
    )  # fmt: skip
    return out


def parts_of(dim: int) -> tuple[int, int]:
    """Return the elements of a head as powers of two, the second of which may be 0."""
    whole = max(power(dim), LEAST)
    low = whole // 2
    rest = max(power(dim - low), LEAST)
    return (low, rest) if low >= LEAST and low + rest < whole else (whole, 0)


def sequence_tile(
    dim: int, tuning: Tuning, *, is_float32: bool, is_biased: bool
) -> AttentionTile:
    """Return the tile of queries of one head.

    Two parts of a head take more registers than prompts' tiles, and so do biases.
    """
    tile = tuning.attention_tile("prompt", dim, is_float32=is_float32)
    if tile is None and not is_float32 and dim <= 128 and is_large(tuning):
        tile = FAST if dim <= 96 else FAST_WIDE
    tile = tile or prefill_tile(dim, is_float32, tuning.shared_bytes, 0)
    is_narrow = is_float32 or (is_biased and dim > 64)
    rows = max(tile.rows // 2, LEAST) if is_narrow else tile.rows
    keys = max(tile.keys // 2, LEAST) if is_biased else tile.keys
    warps = max(tile.warps, 8) if is_biased else tile.warps
    return tile._replace(rows=rows, keys=keys, warps=warps)


def is_large(tuning: Tuning) -> bool:
    """Whether the chip multiplies from shared memory."""
    return tuning.shared_bytes >= LARGEST_SHARED_BYTES


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the kernels of attention within sequences."""
    return tuple(
        Kernel(
            name,
            "triton",
            partial(run, tuning=tuning),
            refuse=partial(refuse_heads, tuning=tuning),
            preference=PREFERENCE,
        )
        for name, run in (
            ("full_attention", full_attention),
            ("biased_attention", biased_attention),
        )
    )
