"""Sampling with penalties and filters, without sorting the vocabulary.

Top-k and top-p keep the most likely tokens down to a threshold. The threshold is an
integer key: the differences from the top logit are floats of one sign, whose bits, as
integers, have the same order. It is found by a radix search of eight passes: each pass
counts tokens, or sums their mass, in the 16 bins of a window, and the next pass
continues in one bin. A program scans a group of chunks and reads only the chunks with
a key in that bin, which are few after the third pass. The order of summation does not
depend on timing, but on the rows of a step, which determine the size of a group.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.step import PARAMS, Step, Tables
from inl_torch.triton.common import dense, power
from inl_torch.triton.sampling.sample_filtered_kernels import (
    filter_masses,
    penalize,
    sample_token,
)
from inl_torch.triton.sampling.sample_filtered_search import (
    BINS,
    LANES,
    search_pass,
)
from inl_torch.triton.sampling.sample_likely import list_segments, sample_likely
from inl_torch.triton.sampling.segments import MOST, SEGMENT
from inl_torch.triton.tuning import Tuning

COLUMNS = len(PARAMS)

WARP = 32
"""Threads of a warp on NVIDIA's chips."""

PASSES = 8
"""Passes of a search: the first leaves at most 28 bits, and each other resolves
four."""

PROGRAMS = 8
"""Programs of a pass per multiprocessor. On an H200, half as many took 11 % longer for
512 rows of 49,152 logits."""

GROUPS = 128
"""Most programs per sample, each of which reads the partial results of all programs of
the previous pass. On an H200, 64 took 12 % longer for one row of 128,256 logits."""


def _group_sizes(samples: int, chunks: int, tuning: Tuning) -> dict[str, int]:
    """Return the chunks per program, and the programs per sample."""
    max_groups = min(max(PROGRAMS * tuning.processors // samples, 1), GROUPS)
    if tuning.fixed_groups:
        max_groups = GROUPS
    per_group = -(-chunks // max_groups)
    groups = -(-chunks // per_group)
    return {
        "CHUNKS_PER_GROUP": per_group, "CHUNKS_PER_GROUP_P": power(per_group),
        "GROUPS": groups, "GROUPS_P": power(groups),
    }  # fmt: skip


def sample_filtered(
    logits: torch.Tensor, step: Step, tables: Tables, *, chunk: int, tuning: Tuning
) -> tuple[torch.Tensor, Tables]:
    """The op ``sample`` with sampler "sample_filtered", in chunks of ``chunk``
    logits.
    """
    logits = dense(logits)
    (samples, vocab), place = logits.shape, logits.device
    chunks = -(-vocab // chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=place)

    options: dict[str, Any] = {
        "COLUMNS": COLUMNS, "CHUNKS": chunks, "CHUNK": chunk,
        # One accumulator per thread and bin: more threads would exchange their sums.
        "num_warps": LANES.value // tuning.lanes,
        "PDL": tuning.uses_pdl(samples), **tuning.launch(samples),
    }  # fmt: skip
    segments = chunks * chunk // SEGMENT.value
    penalized, tops = empty(samples, vocab), empty(samples, segments)
    top_logits, masses = empty(samples, chunks), empty(samples, chunks)
    top_ids = empty(samples, chunks, dtype=torch.int32)
    changed = empty(samples, chunks, dtype=torch.int32)
    stride = logits.stride(0)
    penalize[(samples, chunks)](
        logits, step.tokens, step.starts, step.used_counts, tables.token_counts,
        tables.bias, tables.params, step.slots, penalized, changed, top_logits, top_ids,
        tops, masses, step.tokens.shape[0], stride, vocab, **options,
    )  # fmt: skip
    tokens = empty(samples, dtype=torch.int32)
    is_sampled, limits = empty(2, samples, dtype=torch.int32)
    listed = empty(samples, MOST.value, dtype=torch.int32)
    options["CHUNKS_P"] = max(power(chunks), 16)
    inputs = (
        logits, penalized, changed, top_logits, top_ids, tables.params, step.slots,
        is_sampled,
    )  # fmt: skip
    wide = {**options, "num_warps": 8 * WARP // tuning.lanes}
    list_segments[(samples,)](
        tops, tables.params, step.slots, listed, limits, COUNT=segments,
        COUNT_P=power(segments), COLUMNS=COLUMNS, PDL=options["PDL"],
        num_warps=wide["num_warps"], **tuning.launch(samples),
    )  # fmt: skip
    sample_likely[(samples,)](
        *inputs, listed, limits, masses, step.uniforms, tokens, tables.last, stride,
        vocab, **wide,
    )  # fmt: skip
    sizes = _group_sizes(samples, chunks, tuning)
    grid = (samples, sizes["GROUPS"])
    thresholds, tie_quotas = empty(2, samples, dtype=torch.int32), empty(2, samples)
    filters = (empty(samples), thresholds, tie_quotas)

    def search_state() -> tuple[torch.Tensor, ...]:
        return (
            empty(samples, BINS.value, sizes["GROUPS"]),
            empty(samples, 2, dtype=torch.int32),
            empty(samples),
            empty(samples, chunks, dtype=torch.int32),
        )

    previous, current = search_state(), search_state()
    for by_mass in (False, True):
        for number in range(PASSES):
            search_pass[grid](
                *inputs, *filters, *previous, *current, stride, vocab,
                FIRST=number == 0, BY_MASS=by_mass, **sizes, **options,
            )  # fmt: skip
            previous, current = current, previous
    chunk_masses, ties = empty(samples, chunks), empty(samples, chunks)
    filter_masses[grid](
        *inputs, *filters, *previous[:3], chunk_masses, ties, stride, vocab, **sizes,
        **options,
    )  # fmt: skip
    sample_token[(samples,)](
        *inputs, thresholds, tie_quotas, chunk_masses, ties, step.uniforms, tokens,
        tables.last, stride, vocab, **options,
    )  # fmt: skip
    return tokens, tables
