"""Choosing the next token with penalties and filters, and without sorting.

What top-k and top-p keep are the likeliest tokens down to one, so all that has to be
found is how likely that one is: a whole number, for the gaps below the highest logit
are floats of one sign, whose bits are in their order. It is searched in eight passes:
each counts or weighs what lies in the sixteen parts of a window, and the next goes on
inside one of them. A program goes over a group of chunks and reads those alone that
hold a key there: after the third pass hardly any do. Timing does not change the order
in which masses are added up; the rows of a step do, for they say how large a group is.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.step import PARAMS, Step, Tables
from inl_torch.triton.common import dense, power
from inl_torch.triton.sampling.sample_filtered_kernels import draw, keep, penalize
from inl_torch.triton.sampling.sample_filtered_search import WAYS, weigh
from inl_torch.triton.tuning import Tuning

COLUMNS = len(PARAMS)

PASSES = 8
"""Of a search: 28 bits at most are left after the first, and each takes four."""

PROGRAMS = 8
"""Of a search, for each multiprocessor: half as many took an H200 11 % longer at 512
rows of 49,152."""

GROUPS = 128
"""Most programs of a sample, each of which reads what all left of the pass before: 64
took an H200 12 % longer for one row of 128,256."""


def _cut(samples: int, chunks: int, tuning: Tuning) -> dict[str, int]:
    """How many chunks a program goes over, and how many do for a sample."""
    most = min(max(PROGRAMS * tuning.processors // samples, 1), GROUPS)
    pieces = -(-chunks // most)
    groups = -(-chunks // pieces)
    return {
        "PIECES": pieces, "PIECES_P": power(pieces),
        "GROUPS": groups, "GROUPS_P": power(groups),
    }  # fmt: skip


def choose_full(
    logits: torch.Tensor, step: Step, tables: Tables, *, chunk: int, tuning: Tuning
) -> tuple[torch.Tensor, Tables]:
    """``sample`` with the sampler "sample_filtered"; chunks of ``chunk`` logits."""
    logits = dense(logits)
    (samples, vocab), place = logits.shape, logits.device
    chunks = -(-vocab // chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=place)

    each: dict[str, Any] = {
        "COLUMNS": COLUMNS, "CHUNKS": chunks, "CHUNK": chunk, "num_warps": 4,
        "EARLY": tuning.starts_early(samples), **tuning.launch(samples),
    }  # fmt: skip
    changed = empty(samples, vocab)
    peaks, ids = empty(samples, chunks), empty(samples, chunks, dtype=torch.int32)
    penalize[(samples, chunks)](
        logits, step.tokens, step.starts, step.used_counts, tables.token_counts, tables.bias,
        tables.params, step.slots, changed, peaks, ids, step.tokens.shape[0],
        logits.stride(0), vocab, **each,
    )  # fmt: skip
    each["CHUNKS_P"] = max(power(chunks), 16)
    cut = _cut(samples, chunks, tuning)
    grid = (samples, cut["GROUPS"])
    given = (changed, peaks, ids, tables.params, step.slots)
    edges, rooms = empty(2, samples, dtype=torch.int32), empty(2, samples)
    found = (empty(samples), edges, rooms)

    def state() -> tuple[torch.Tensor, ...]:
        return (
            empty(samples, WAYS.value, cut["GROUPS"]),
            empty(samples, 2, dtype=torch.int32),
            empty(samples),
            empty(samples, chunks, dtype=torch.int32),
        )

    left, leaves = state(), state()
    for by_mass in (False, True):
        for number in range(PASSES):
            weigh[grid](
                *given, *found, *left, *leaves, vocab, FIRST=number == 0,
                BY_MASS=by_mass, **cut, **each,
            )  # fmt: skip
            left, leaves = leaves, left
    masses, ties = empty(samples, chunks), empty(samples, chunks)
    keep[grid](*given, *found, *left[:3], masses, ties, vocab, **cut, **each)
    tokens = empty(samples, dtype=torch.int32)
    draw[(samples,)](
        *given, edges, rooms, masses, ties, step.uniforms, tokens, tables.last, vocab,
        **each,
    )  # fmt: skip
    return tokens, tables
