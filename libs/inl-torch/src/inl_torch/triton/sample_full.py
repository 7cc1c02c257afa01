"""Choosing the next token with penalties and filters, and without sorting.

What top-k and top-p keep are the likeliest tokens down to one, so all that has to be
found is how likely that one is: a whole number, for the gaps below the highest logit
are floats of one sign, whose bits are in their order. It is searched four bits at a
time: each pass counts and weighs what a program's logits have up to sixteen bounds, and
the next pass adds that up, always in the same order, and goes on inside one of them.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.values import PARAMS, Step, Tables
from inl_torch.triton.common import dense, power
from inl_torch.triton.sample_full_kernels import (
    BITS,
    FIRST,
    WAYS,
    between,
    count_fed,
    draw,
    keep,
    penalize,
    weigh,
)
from inl_torch.triton.tuning import Tuning

COLUMNS = len(PARAMS)


def choose_full(
    logits: torch.Tensor, step: Step, tables: Tables, *, chunk: int, tuning: Tuning
) -> tuple[torch.Tensor, Tables]:
    """``choose`` with the sampler "full"; ``chunk`` logits for each program."""
    logits = dense(logits)
    (samples, vocab), place = logits.shape, logits.device
    chunks = -(-vocab // chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=place)

    early = {"EARLY": tuning.starts_early(samples), **tuning.launch(samples)}
    each: dict[str, Any] = {"COLUMNS": COLUMNS, "CHUNKS": chunks, **early}
    sizes = {**each, "CHUNKS_P": max(power(chunks), 16)}
    count_fed[(step.slots.shape[0],)](
        step.tokens, step.starts, step.slots, step.counts, tables.counts,
        step.tokens.shape[0], vocab, num_warps=1, **early,
    )  # fmt: skip
    changed = empty(samples, vocab)
    peaks, ids = empty(samples, chunks), empty(samples, chunks, dtype=torch.int32)
    grid = (samples, chunks)
    penalize[grid](
        logits, tables.counts, tables.bias, tables.params, step.slots, changed, peaks,
        ids, logits.stride(0), vocab, CHUNK=chunk, num_warps=4, **each,
    )  # fmt: skip
    counted, weighed = (empty(2, samples, WAYS.value, chunks) for _ in range(2))
    bounds, below = empty(2, samples, dtype=torch.int32), empty(2, samples, 2)
    goals, rooms = empty(samples), empty(2, samples)
    edges = empty(2, samples, dtype=torch.int32)
    given = (changed, peaks, ids, tables.params, step.slots)
    search = (counted, weighed, bounds, below, goals)

    def search_on(shift: int, *, by_mass: bool) -> None:
        weigh[grid](
            *given, *search, vocab, CHUNK=chunk, SHIFT=shift, BY_MASS=by_mass,
            num_warps=8, **sizes,
        )  # fmt: skip

    shifts = range(FIRST.value, -1, -BITS.value)
    for shift in shifts:
        search_on(shift, by_mass=False)
    search_on(shifts[0], by_mass=True)
    between[(samples,)](
        *given[3:], *search, edges, rooms, num_warps=4, **sizes
    )  # fmt: skip
    for shift in shifts[1:]:
        search_on(shift, by_mass=True)
    masses, ties = empty(samples, chunks), empty(samples, chunks)
    keep[grid](
        *given, *search, edges, rooms, masses, ties, vocab, CHUNK=chunk, num_warps=4,
        **sizes,
    )  # fmt: skip
    tokens = empty(samples, dtype=torch.int32)
    draw[(samples,)](
        *given, edges, rooms, masses, ties, step.uniforms, tokens, tables.last, vocab,
        CHUNK=chunk, num_warps=4, **sizes,
    )  # fmt: skip
    return tokens, tables
