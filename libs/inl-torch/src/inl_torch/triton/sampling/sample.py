"""Choosing the next token without sorting the vocabulary, nor reading it whole twice.

Each program takes a chunk of one sample's logits; a last one, which finds the chunk
first, decides. Filters and penalties are in :mod:`inl_torch.triton.sampling.sample_filtered`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.step import PARAMS, Step, Tables
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.pdl import follow
from inl_torch.triton.sampling.reductions import best, drawn_chunk, drawn_id, peak_of
from inl_torch.triton.sampling.sample_filtered import choose_full
from inl_torch.triton.tuning import Tuning

CHUNK = 1024
"""Least logits of a program; filters cannot do with less."""

CHUNKS = 256
"""Most programs of a sample."""


@triton.jit
def _peaks(
    logits: tensor, peaks: tensor, ids: tensor, stride: tensor, V: tensor,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The highest logit of a chunk and its lowest id."""
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
    peak, found = peak_of(x.to(tl.float32), at, V)
    tl.store(peaks + sample * CHUNKS + tl.program_id(1), peak)
    tl.store(ids + sample * CHUNKS + tl.program_id(1), found)


@triton.jit
def _masses(
    logits: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    masses: tensor, stride: tensor, V: tensor, W: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The mass of a chunk at its row's temperature."""
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    peak, _ = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    slot = tl.load(slots + sample // W).to(tl.int64)
    heat = tl.load(settings + slot * COLUMNS)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
    mass = tl.exp((x.to(tl.float32) - peak) / tl.where(heat > 0, heat, 1.0))
    tl.store(masses + sample * CHUNKS + tl.program_id(1), tl.sum(mass, 0))


@triton.jit
def _pick(
    logits: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    masses: tensor, uniforms: tensor, tokens: tensor, last: tensor, stride: tensor,
    V: tensor, W: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr, DRAWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Decide on one sample's token, and remember a row's last."""
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample // W).to(tl.int64)
    peak, token = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    if DRAWS:
        heat = tl.load(settings + slot * COLUMNS)
        if heat > 0:
            chunk = tl.arange(0, CHUNKS_P)
            cells = masses + sample * CHUNKS + chunk
            mass = tl.load(cells, mask=chunk < CHUNKS, other=0)
            uniform = tl.load(uniforms + sample).to(tl.float32, bitcast=True)
            at_chunk, goal, below, total = drawn_chunk(mass, uniform, chunk)
            at = at_chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
            alone = tl.exp((x.to(tl.float32) - peak) / heat)
            # Where there is no mass, as beside an infinite logit, the highest is taken.
            found = drawn_id(tl.where(at < V, alone, 0.0), at, goal, below)
            token = tl.where(total > 0, found, token)
    tl.store(tokens + sample, token)
    tl.store(last + slot, token, mask=sample % W == W - 1)


def sample(
    logits: torch.Tensor, step: Step, tables: Tables, *, sampler: str, tuning: Tuning
) -> tuple[torch.Tensor, Tables]:
    logits = dense(logits)
    samples, vocab = logits.shape
    chunk = max(CHUNK, power(-(-vocab // CHUNKS)))
    if sampler == "sample_filtered":
        return choose_full(logits, step, tables, chunk=chunk, tuning=tuning)
    chunks, place = -(-vocab // chunk), logits.device
    peaks = torch.empty((samples, chunks), dtype=torch.float32, device=place)
    ids = torch.empty((samples, chunks), dtype=torch.int32, device=place)
    tokens = torch.empty(samples, dtype=torch.int32, device=place)
    sizes = {
        "CHUNKS": chunks, "CHUNK": chunk, "EARLY": tuning.starts_early(samples),
        "num_warps": 4, **tuning.launch(samples),
    }  # fmt: skip
    rest = {
        "W": samples // step.slots.shape[0], "COLUMNS": len(PARAMS),
        "CHUNKS_P": max(power(chunks), 16),
    }  # fmt: skip
    stride = logits.stride(0)
    _peaks[(samples, chunks)](logits, peaks, ids, stride, vocab, **sizes)
    found = (logits, peaks, ids, tables.params, step.slots)
    masses = peaks
    if sampler == "sample":
        masses = torch.empty_like(peaks)
        _masses[(samples, chunks)](*found, masses, stride, vocab, **rest, **sizes)
    _pick[(samples,)](
        *found, masses, step.uniforms, tokens, tables.last, stride, vocab,
        DRAWS=sampler == "sample", **rest, **sizes,
    )  # fmt: skip
    return tokens, tables


def _refuse(
    logits: Any,
    _step: Any,
    _tables: Any,
    *,
    sampler: str,
    tuning: Tuning,
) -> str | None:
    if sampler == "sample_filtered" and not tuning.filters:
        return "full: not measured on this chip yet; the library sorts instead"
    return refuse_dtype(logits)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """The kernel, cut as ``tuning`` says."""
    return (
        Kernel(
            "sample",
            "triton",
            partial(sample, tuning=tuning),
            refuse=partial(_refuse, tuning=tuning),
            preference=PREFERENCE,
        ),
    )
