"""Verification of drafted tokens, without transfers to the host."""

from __future__ import annotations

import torch

from inl.spec.kernel import Kernel
from inl.spec.step import NO_TOKEN, Step, Tables


def expand_rows(step: Step, tables: Tables) -> tuple[Step, Tables]:
    count, device = step.tokens.shape[0], step.tokens.device
    index = torch.arange(count, device=device)
    used = index < step.used_counts[2]
    slots = step.slots.index_select(0, step.rows.long()).masked_fill(~used, 0).long()
    counts = tables.token_counts.index_select(0, slots)
    if counts.shape[1]:
        before = (step.rows.unsqueeze(1) == step.rows) & (index.unsqueeze(1) > index)
        before &= used.unsqueeze(1) & used
        ids = step.tokens.long().expand(count, count)
        counts.scatter_add_(1, ids, 2 * before.to(counts.dtype))
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    expanded = step._replace(
        starts=torch.arange(count + 1, device=device, dtype=step.starts.dtype),
        slots=index.to(step.slots.dtype),
        samples=index.to(step.samples.dtype),
        used_counts=step.used_counts[2:].repeat(3),
    )
    return expanded, Tables(
        blocks=zeros.new_zeros((1, count, tables.blocks.shape[2])),
        lengths=zeros,
        last=torch.zeros_like(zeros),
        adapters=zeros,
        params=tables.params.index_select(0, slots),
        token_counts=counts,
        bias=tables.bias.index_select(0, slots),
    )


def verify(
    tokens: torch.Tensor, step: Step, tables: Tables, *, width: int
) -> tuple[torch.Tensor, Tables]:
    starts = step.starts.long()
    counts = starts[1:] - starts[:-1]
    offsets = torch.arange(width, device=tokens.device)
    inside = offsets < counts.unsqueeze(1)
    at = (starts[:-1].unsqueeze(1) + offsets).masked_fill(~inside, 0)
    sampled = tokens.int()[at].masked_fill(~inside, NO_TOKEN)
    inputs = step.tokens[at].long()
    agrees = inside[:, 1:] & (sampled[:, :-1] == inputs[:, 1:])
    first = torch.ones_like(inside[:, :1])
    kept = inside & torch.cat([first, agrees], 1).long().cumprod(1).bool()
    accepted = kept.long().sum(1)
    last = sampled.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1))[:, 0]
    slots = step.slots.long()
    lengths = step.lengths.long() - (counts - accepted)
    tables.lengths.index_copy_(0, slots, lengths.to(tables.lengths.dtype))
    tables.last.index_copy_(0, slots, last.clamp(min=0).to(tables.last.dtype))
    if tables.token_counts.shape[1]:
        places = slots.unsqueeze(1).expand(inputs.shape), inputs
        added = 2 * kept.to(tables.token_counts.dtype)
        tables.token_counts.index_put_(places, added, accumulate=True)
    return sampled.masked_fill(~kept, NO_TOKEN).view(-1), tables


def own_slots(step: Step) -> tuple[torch.Tensor, Step]:
    slots = step.slots
    number = torch.arange(1, slots.shape[0] + 1, device=slots.device)
    own = number.masked_fill(number > step.used_counts[1:2], 0).to(slots.dtype)
    index = torch.cat([torch.zeros_like(slots[:1]), slots]).int()
    return index, step._replace(slots=own, plan=())


def accepted_rows(
    kept: torch.Tensor, step: Step, *, width: int
) -> tuple[torch.Tensor, Step]:
    rows, total = step.slots.shape[0], step.tokens.shape[0]
    counts = (kept.view(rows, width) != NO_TOKEN).sum(1)
    ends = counts.cumsum(0)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    number = torch.arange(total, device=kept.device)
    row = (number.unsqueeze(1) >= ends).sum(1).clamp(max=rows - 1)
    index = step.starts.long()[row] + number - starts[row]
    index = index.masked_fill(number >= ends[-1:], 0)
    return index.int(), step._replace(
        tokens=step.tokens[index],
        positions=step.positions[index],
        rows=row.to(step.rows.dtype),
        starts=starts.to(step.starts.dtype),
        used_counts=torch.cat(
            [step.used_counts[:2], ends[-1:].to(step.used_counts.dtype)]
        ),
        plan=(),
    )


KERNELS = (
    Kernel("accepted_rows", "eager", accepted_rows, invariant=True),
    Kernel("own_slots", "eager", own_slots, invariant=True),
    Kernel("expand_rows", "eager", expand_rows, invariant=True),
    Kernel("verify", "eager", verify, invariant=True),
)
