"""Reads and writes of per-slot state."""

from __future__ import annotations

import torch

from inl.spec.kernel import Kernel
from inl.spec.step import Step


def _broadcast(mask: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *(1,) * (table.ndim - 1))


def read_slots(table: torch.Tensor, step: Step) -> torch.Tensor:
    rows = step.rows.long()
    used = torch.arange(rows.shape[0], device=rows.device) < step.used_counts[2:]
    continues = used & (rows < step.used_counts[:1])
    values = table.index_select(0, step.slots.long().index_select(0, rows))
    return values.masked_fill_(_broadcast(~continues, table), 0)


def write_slots(x: torch.Tensor, table: torch.Tensor, step: Step) -> torch.Tensor:
    slots = step.slots.long()
    unused = torch.arange(slots.shape[0], device=slots.device) >= step.used_counts[1:2]
    last = (step.starts[1:].long() - 1).clamp_(0, x.shape[0] - 1)
    ends = x.index_select(0, last).masked_fill_(_broadcast(unused, table), 0)
    return table.index_copy_(0, slots, ends)


KERNELS = (
    Kernel("read_slots", "eager", read_slots, invariant=True),
    Kernel("write_slots", "eager", write_slots, invariant=True),
)
