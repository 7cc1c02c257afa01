"""Restriction of a step to its sampled tokens, as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.common import PREFERENCE

ROWS = 128
"""Rows per program."""


@triton.jit
def _prune_last_layer(
    samples: tensor, tokens: tensor, positions: tensor, rows: tensor, writes: tensor,
    counts: tensor, new_tokens: tensor, new_positions: tensor, new_rows: tensor,
    new_starts: tensor, new_writes: tensor, new_samples: tensor, new_counts: tensor,
    T: tensor, R: tensor, G: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < R
    at = tl.load(samples + row, mask=in_rows, other=0)
    used = tl.load(counts + 1)
    tl.store(new_tokens + row, tl.load(tokens + at), mask=in_rows)
    tl.store(new_positions + row, tl.load(positions + at), mask=in_rows)
    tl.store(new_rows + row, tl.load(rows + at), mask=in_rows)
    for group in tl.static_range(0, G):
        cell = tl.load(writes + group * T + at)
        tl.store(new_writes + group * R + row, cell, mask=in_rows)
    tl.store(new_starts + row, tl.minimum(row, used), mask=row <= R)
    tl.store(new_samples + row, row, mask=in_rows)
    index = tl.arange(0, 4)
    tl.store(new_counts + index, used + index * 0, mask=index < 3)


def prune_last_layer(step: Step) -> Step:
    rows, groups = step.lengths.shape[0], step.writes.shape[0]
    pruned = step._replace(
        tokens=step.tokens.new_empty(rows),
        positions=step.positions.new_empty(rows),
        rows=step.rows.new_empty(rows),
        starts=step.starts.new_empty(rows + 1),
        writes=step.writes.new_empty(groups, rows),
        samples=step.samples.new_empty(rows),
        used_counts=torch.empty_like(step.used_counts),
        plan=(),
    )
    _prune_last_layer[(rows // ROWS + 1,)](
        step.samples, step.tokens, step.positions, step.rows, step.writes,
        step.used_counts, pruned.tokens, pruned.positions, pruned.rows, pruned.starts,
        pruned.writes, pruned.samples, pruned.used_counts, step.tokens.shape[0], rows,
        G=groups, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return pruned


KERNELS = (
    Kernel(
        "prune_last_layer",
        "triton",
        prune_last_layer,
        invariant=True,
        preference=PREFERENCE,
    ),
)
