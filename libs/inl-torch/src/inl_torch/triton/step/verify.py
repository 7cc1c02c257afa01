"""Verification of drafted tokens, in one launch before and one after sampling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.step import NO_TOKEN, PARAMS, Step, Tables
from inl_torch.triton.common import PREFERENCE, power
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning

REJECTED = tl.constexpr(NO_TOKEN)


@triton.jit
def _copy_params(
    rows: tensor, slots: tensor, used_counts: tensor, param_table: tensor,
    copies: tensor,
    index: tensor, starts: tensor, counts: tensor, T: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMNS_P: tl.constexpr, TP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the sampling parameters of each token's slot; count the tokens."""
    pdl_sync(PDL)
    token = tl.program_id(0) * TP + tl.arange(0, TP)
    total = tl.load(used_counts + 2)
    used = token < total
    row = tl.load(rows + token, mask=used, other=0)
    slot = tl.load(slots + row, mask=used, other=0).to(tl.int64)
    column = tl.arange(0, COLUMNS_P)
    mask = (token < T)[:, None] & (column < COLUMNS)[None, :]
    values = tl.load(param_table + slot[:, None] * COLUMNS + column[None, :], mask=mask)
    tl.store(copies + token[:, None] * COLUMNS + column[None, :], values, mask=mask)
    tl.store(index + token, token, mask=token < T)
    tl.store(starts + token, token, mask=token < T + 1)
    three = tl.arange(0, 4)
    tl.store(counts + three, total + three * 0, mask=three < 3)


def expand_rows(step: Step, tables: Tables, *, tuning: Tuning) -> tuple[Step, Tables]:
    count, device = step.tokens.shape[0], step.tokens.device
    params = torch.empty((count, len(PARAMS)), dtype=torch.float32, device=device)
    index = torch.empty_like(step.samples)
    starts = torch.empty(count + 1, dtype=step.starts.dtype, device=device)
    counts = torch.empty_like(step.used_counts)
    tile = min(max(power(count + 1), 16), 128)
    _copy_params[(-(-(count + 1) // tile),)](
        step.rows, step.slots, step.used_counts, tables.params, params, index, starts,
        counts, T=count, COLUMNS=len(PARAMS), COLUMNS_P=power(len(PARAMS)), TP=tile,
        PDL=tuning.uses_pdl(count), num_warps=4, **tuning.launch(count),
    )  # fmt: skip
    expanded = step._replace(
        starts=starts, slots=index, samples=index, used_counts=counts
    )
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    return expanded, Tables(
        blocks=zeros.new_zeros((1, count, tables.blocks.shape[2])),
        lengths=zeros,
        last=torch.zeros_like(zeros),
        adapters=zeros,
        params=params,
        token_counts=tables.token_counts.new_empty((count, 0)),
        bias=tables.bias.new_empty((count, 0)),
    )


@triton.jit
def _verify(
    sampled: tensor, inputs: tensor, starts: tensor, after: tensor, slots: tensor,
    lengths: tensor, last: tensor, token_counts: tensor, result: tensor,
    V: tensor, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, COUNTED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Accept the samples of one row up to the first that is not the next draft."""
    pdl_sync(PDL)
    row = tl.program_id(0)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, WIDTH_P)
    token = tl.load(sampled + first + at, mask=at < count, other=REJECTED)
    drafted = tl.load(inputs + first + at + 1, mask=at + 1 < count, other=0)
    differs = (at + 1 >= count) | (token != drafted)
    # The first difference is the last sample that is accepted.
    accepted = tl.min(tl.where(differs, at + 1, WIDTH_P), 0)
    accepted = tl.minimum(accepted, count).to(tl.int32)
    kept = at < accepted
    tl.store(result + row * WIDTH + at, tl.where(kept, token, REJECTED),
             mask=at < WIDTH)  # fmt: skip
    newest = tl.max(tl.where(at == accepted - 1, token, 0), 0)
    tl.store(lengths + slot, tl.load(after + row) - (count - accepted))
    tl.store(last + slot, tl.maximum(newest, 0))
    if COUNTED:
        fed = tl.load(inputs + first + at, mask=kept, other=0).to(tl.int64)
        tl.atomic_add(token_counts + slot * V + fed, 2 + at * 0, mask=kept)


def verify(
    tokens: torch.Tensor, step: Step, tables: Tables, *, width: int, tuning: Tuning
) -> tuple[torch.Tensor, Tables]:
    rows, vocab = step.slots.shape[0], tables.token_counts.shape[1]
    count = step.tokens.shape[0]
    result = torch.empty((rows, width), dtype=torch.int32, device=tokens.device)
    _verify[(rows,)](
        tokens, step.tokens, step.starts, step.lengths, step.slots, tables.lengths,
        tables.last, tables.token_counts if vocab else tables.last, result, vocab,
        WIDTH=width, WIDTH_P=max(power(width), 16), COUNTED=vocab > 0,
        PDL=tuning.uses_pdl(count), num_warps=1, **tuning.launch(count),
    )  # fmt: skip
    return result.view(-1), tables


def _refuse_counts(_step: Any, tables: Any) -> str | None:
    if tables.token_counts.shape[1]:
        return "takes no token counts: their copies use the eager kernel"
    return None


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return both kernels; integers only, hence batch-invariant."""
    return (
        Kernel(
            "expand_rows",
            "triton",
            partial(expand_rows, tuning=tuning),
            refuse=_refuse_counts,
            invariant=True,
            preference=PREFERENCE,
        ),
        Kernel(
            "verify",
            "triton",
            partial(verify, tuning=tuning),
            invariant=True,
            preference=PREFERENCE,
        ),
    )
