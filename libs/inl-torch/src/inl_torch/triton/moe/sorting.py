"""Slots of a mixture of experts sorted by expert, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.common import power

BLOCK = 4096
"""Most slots that a program compares at a time."""


class SortedSlots(NamedTuple):
    """Slots sorted by expert."""

    order: torch.Tensor
    """[S] int32 slot ids; those of no expert are not in it, and its end is not set."""
    counts: torch.Tensor
    """[E] int32, slots per expert."""


@triton.jit
def place_slots(
    ids: tensor, order: tensor, counts: tensor, slots: tensor, BLOCK: tl.constexpr
) -> None:
    """Store the slots of one expert in order, after those of the experts before it.

    Slots whose ids are below 0 or not below the number of experts have no place.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, slots, BLOCK):
        chosen = tl.load(ids + start + at, mask=start + at < slots, other=expert)
        lower += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    first = tl.sum(lower, 0)
    count = 0
    for start in range(0, slots, BLOCK):
        chosen = tl.load(ids + start + at, mask=start + at < slots, other=-1)
        own = (chosen == expert).to(tl.int32)
        place = first + count + tl.cumsum(own, 0) - own
        tl.store(order + place, start + at, mask=own > 0)
        count += tl.sum(own, 0)
    tl.store(counts + expert, count)


def sort_by_expert(ids: torch.Tensor, experts: int) -> SortedSlots:
    """Sort the slots of ``ids`` [T, k], int32, by expert; slots of one stay in order.

    Every expert has a program that reads all ids, of which there are few: no program
    waits for another one, and the order does not depend on which runs first.
    """
    slots = ids.numel()
    sorted_slots = SortedSlots(
        torch.empty(slots, dtype=torch.int32, device=ids.device),
        torch.empty(experts, dtype=torch.int32, device=ids.device),
    )
    place_slots[(experts,)](
        ids, *sorted_slots, slots, BLOCK=min(power(slots), BLOCK), num_warps=4
    )
    return sorted_slots


def tile_slots(slots: int, experts: int) -> int:
    """Slots per tile: the average per expert, rounded up to a supported size."""
    return max(power(slots // experts), 16)
