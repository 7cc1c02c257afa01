"""Sampling without sorting the vocabulary.

The logits of a row are reduced in chunks, one per program; a final program samples a
chunk, then a token in it, so that logits are read at most three times. Filters and
penalties are in :mod:`inl_torch.triton.sampling.sample_filtered`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.step import PARAMS, Step, Tables
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.sampling.reductions import (
    chunk_top,
    global_top,
    sample_chunk,
    sample_id,
)
from inl_torch.triton.sampling.sample_filtered import sample_filtered
from inl_torch.triton.tuning import Tuning

CHUNK = 1024
"""Fewest logits per program, as required by the filters."""

CHUNKS = 256
"""Most programs per sample."""


@triton.jit
def _chunk_tops(
    logits: tensor, top_logits: tensor, top_ids: tensor, stride: tensor, V: tensor,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store the top logit of a chunk and its lowest id."""
    pdl_sync(PDL)
    sample = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
    top_logit, arguments = chunk_top(x.to(tl.float32), at, V)
    tl.store(top_logits + sample * CHUNKS + tl.program_id(1), top_logit)
    tl.store(top_ids + sample * CHUNKS + tl.program_id(1), arguments)


@triton.jit
def _chunk_masses(
    logits: tensor, top_logits: tensor, top_ids: tensor, param_table: tensor,
    slots: tensor, chunk_masses: tensor, stride: tensor, V: tensor,
    PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store the mass of a chunk: the sum of its unnormalized probabilities."""
    pdl_sync(PDL)
    sample = tl.program_id(0).to(tl.int64)
    top_logit, top_id = global_top(top_logits, top_ids, sample, CHUNKS, CHUNKS_P)
    if top_id < 0:
        return
    slot = tl.load(slots + sample // PER_ROW).to(tl.int64)
    temperature = tl.load(param_table + slot * COLUMNS)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
    mass = tl.exp(
        (x.to(tl.float32) - top_logit) / tl.where(temperature > 0, temperature, 1.0)
    )
    tl.store(chunk_masses + sample * CHUNKS + tl.program_id(1), tl.sum(mass, 0))


@triton.jit
def _sample_token(
    logits: tensor, top_logits: tensor, top_ids: tensor, param_table: tensor,
    slots: tensor, chunk_masses: tensor, uniforms: tensor, tokens: tensor, last: tensor,
    stride: tensor, V: tensor, PER_ROW: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    SAMPLES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Sample one token, and store the last token of each row."""
    pdl_sync(PDL)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample // PER_ROW).to(tl.int64)
    top_logit, token = global_top(top_logits, top_ids, sample, CHUNKS, CHUNKS_P)
    if SAMPLES:
        temperature = tl.load(param_table + slot * COLUMNS)
        if (temperature > 0) & (token >= 0):
            chunk = tl.arange(0, CHUNKS_P)
            cells = chunk_masses + sample * CHUNKS + chunk
            mass = tl.load(cells, mask=chunk < CHUNKS, other=0)
            uniform = tl.load(uniforms + sample).to(tl.float32, bitcast=True)
            chosen_chunk, target, below, total = sample_chunk(mass, uniform, chunk)
            at = chosen_chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + sample * stride + at, mask=at < V, other=float("-inf"))
            p = tl.exp((x.to(tl.float32) - top_logit) / temperature)
            chosen = sample_id(tl.where(at < V, p, 0.0), at, target, below)
            token = tl.where(total > 0, chosen, token)
    tl.store(tokens + sample, token)
    is_last = sample % PER_ROW == PER_ROW - 1
    tl.store(last + slot, tl.maximum(token, 0), mask=is_last)


def sample(
    logits: torch.Tensor, step: Step, tables: Tables, *, sampler: str, tuning: Tuning
) -> tuple[torch.Tensor, Tables]:
    logits = dense(logits)
    samples, vocab = logits.shape
    chunk = max(CHUNK, power(-(-vocab // CHUNKS)))
    if sampler == "sample_filtered":
        return sample_filtered(logits, step, tables, chunk=chunk, tuning=tuning)
    chunks, place = -(-vocab // chunk), logits.device
    top_logits = torch.empty((samples, chunks), dtype=torch.float32, device=place)
    top_ids = torch.empty((samples, chunks), dtype=torch.int32, device=place)
    tokens = torch.empty(samples, dtype=torch.int32, device=place)
    sizes = {
        "CHUNKS": chunks, "CHUNK": chunk, "PDL": tuning.uses_pdl(samples),
        "num_warps": 4, **tuning.launch(samples),
    }  # fmt: skip
    constants = {
        "PER_ROW": samples // step.slots.shape[0], "COLUMNS": len(PARAMS),
        "CHUNKS_P": max(power(chunks), 16),
    }  # fmt: skip
    stride = logits.stride(0)
    _chunk_tops[(samples, chunks)](logits, top_logits, top_ids, stride, vocab, **sizes)
    arguments = (logits, top_logits, top_ids, tables.params, step.slots)
    chunk_masses = top_logits
    if sampler == "sample":
        chunk_masses = torch.empty_like(top_logits)
        _chunk_masses[(samples, chunks)](
            *arguments, chunk_masses, stride, vocab, **constants, **sizes
        )
    _sample_token[(samples,)](
        *arguments, chunk_masses, step.uniforms, tokens, tables.last, stride, vocab,
        SAMPLES=sampler == "sample", **constants, **sizes,
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
        return "sample_filtered: not measured on this chip; the eager kernel is used"
    return refuse_dtype(logits)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the sampling kernel, and one that is batch-invariant."""
    fixed = replace(tuning, fixed_groups=True)
    return (
        Kernel(
            "sample",
            "triton_rows",
            partial(sample, tuning=fixed),
            refuse=partial(_refuse, tuning=fixed),
            invariant=True,
            preference=-1,
        ),
        Kernel(
            "sample",
            "triton",
            partial(sample, tuning=tuning),
            refuse=partial(_refuse, tuning=tuning),
            preference=PREFERENCE,
        ),
    )
