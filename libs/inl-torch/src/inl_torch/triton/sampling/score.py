"""Log-probabilities without sorting the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.step import TOP, Scores
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.sampling.segments import (
    MOST,
    PADDING,
    SEGMENT,
    ordered,
    store_segments,
)
from inl_torch.triton.tuning import Tuning

CHUNK = 1024
"""Fewest logits per program."""

CHUNKS = 256
"""Most programs per sample."""


@triton.jit
def _chunk_sums(
    logits: tensor, tokens: tensor, tops: tensor, highest: tensor, masses: tensor,
    stride: tensor, V: tensor, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the top logits of a chunk and of its segments, and its mass relative to its
    top.
    """
    sample = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + sample) < 0:
        return
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
    x = x.to(tl.float32)
    cell = sample * CHUNKS + tl.program_id(1)
    segment = tl.arange(0, CHUNK // SEGMENT)
    each = tl.max(tl.reshape(x, (CHUNK // SEGMENT, SEGMENT)), 1)
    tl.store(tops + cell * (CHUNK // SEGMENT) + segment, each)
    top = tl.max(x, 0)
    tl.store(highest + cell, top)
    base = tl.where(top > float("-inf"), top, 0.0)
    tl.store(masses + cell, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _list_segments(
    tokens: tensor, tops: tensor, listed: tensor, COUNT: tl.constexpr,
    COUNT_P: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    """List the segments of the ``N`` most probable tokens."""
    sample = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + sample) < 0:
        return
    store_segments(tops, listed, sample, N, COUNT, COUNT_P)


@triton.jit
def _score_row(
    logits: tensor, tokens: tensor, listed: tensor, highest: tensor, masses: tensor,
    chosen: tensor, ids: tensor, values: tensor, stride: tensor, V: tensor,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, N: tl.constexpr, N_P: tl.constexpr,
) -> None:  # fmt: skip
    """Store the scores of one token, and of the ``N`` most probable ones."""
    sample = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + sample)
    if token < 0:
        return
    chunk = tl.arange(0, CHUNKS_P)
    cells, valid = sample * CHUNKS + chunk, chunk < CHUNKS
    top = tl.load(highest + cells, mask=valid, other=float("-inf"))
    top_logit = tl.max(top, 0)
    mass = tl.load(masses + cells, mask=valid, other=0) * tl.exp(top - top_logit)
    log_sum = top_logit + tl.log(tl.sum(mass, 0))
    row = logits + sample * stride
    tl.store(chosen + sample, tl.load(row + token).to(tl.float32) - log_sum)
    each = tl.arange(0, N_P * SEGMENT)
    segment = tl.load(listed + sample * MOST + each // SEGMENT)
    at = segment * SEGMENT + each % SEGMENT
    x = tl.load(row + at, mask=at < V, other=0).to(tl.float32)
    keys = tl.where(at < V, ordered(x), PADDING)
    for place in range(N):
        key = tl.max(keys, 0)
        best = tl.min(tl.where(keys == key, at, V), 0)
        keys = tl.where(at == best, PADDING, keys)
        bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
        tl.store(ids + sample * N + place, best)
        tl.store(
            values + sample * N + place, bits.to(tl.float32, bitcast=True) - log_sum
        )


def score(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    logits = dense(logits)
    (samples, vocab), place = logits.shape, logits.device
    count = min(TOP, vocab)
    chunk = max(CHUNK, power(-(-vocab // CHUNKS)))
    chunks = -(-vocab // chunk)
    segments = chunks * chunk // SEGMENT.value

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=place)

    tops, sums = empty(samples, segments), empty(2, samples, chunks)
    listed = empty(samples, MOST.value, dtype=torch.int32)
    scores = Scores(
        chosen=empty(samples),
        ids=empty(samples, count, dtype=torch.int32),
        values=empty(samples, count),
    )
    _chunk_sums[(samples, chunks)](
        logits, tokens, tops, *sums, logits.stride(0), vocab, CHUNKS=chunks,
        CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    _list_segments[(samples,)](
        tokens, tops, listed, COUNT=segments, COUNT_P=power(segments), N=count,
        num_warps=8,
    )  # fmt: skip
    _score_row[(samples,)](
        logits, tokens, listed, *sums, *scores, logits.stride(0), vocab,
        CHUNKS=chunks, CHUNKS_P=max(power(chunks), 16), N=count, N_P=power(count),
        num_warps=4,
    )  # fmt: skip
    return scores


def _refuse(logits: Any, _tokens: Any, *, tuning: Tuning) -> str | None:
    if not tuning.filters:
        return "not measured on this chip; the eager kernel is used"
    return refuse_dtype(logits)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the kernel of log-probabilities."""
    refuse = partial(_refuse, tuning=tuning)
    return (
        Kernel(
            "score",
            "triton",
            score,
            refuse=refuse,
            invariant=True,
            preference=PREFERENCE,
        ),
    )
