"""Mixture of experts: tokens grouped by expert, one product per group.

On the CPU, where sizes can be read without synchronizing, there is one group per
expert with tokens. Elsewhere shapes do not depend on the routing, so that a CUDA graph
can capture them. The method depends on the number of slots (token-expert pairs): few
slots use a copy of their expert's matrix each, a moderate number of tokens goes through
every expert, and many slots are padded to blocks of one expert each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from inl.ops.group_route import ExpertBias, check_groups
from inl.ops.moe import LEAST, ExpertLinear, Experts, check_routing
from inl.spec.kernel import Kernel
from inl_torch.eager.inl import upcast
from inl_torch.eager.linear import product
from inl_torch.eager.mlp import gated_activation

COPY_COST = 3
"""Memory passes over a matrix that is copied before it is used."""

DENSE_ROWS = 128
"""Most rows for which every expert computes all rows: reading the matrices, once each,
then takes longer than multiplying."""

Index = int | torch.Tensor | None
"""One expert, the expert of each block, or ``None`` for all experts in order."""

Apply = Callable[[torch.Tensor, Index], torch.Tensor]
"""Computes rows of one expert, blocks [N, B, K] of experts [N], or rows of all experts,
[E, rows, N]."""


def route(
    logits: torch.Tensor, *, k: int, kind: str, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    check_routing(logits.shape[-1], k, kind)
    scores = upcast(logits)
    is_nan = scores.isnan()
    ids = _best(scores.masked_fill(is_nan, -torch.inf), k)
    if kind == "softmax_topk":
        weights = scores.softmax(-1).gather(-1, ids)
    elif kind == "topk_softmax":
        weights = scores.gather(-1, ids).softmax(-1)
    else:
        weights = scores.gather(-1, ids).sigmoid()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=LEAST)
    weights = weights.masked_fill(is_nan.any(-1, keepdim=True), torch.nan)
    return ids.int(), weights


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    # The order of equal values in topk is undefined. Adding 0 turns -0.0 into 0.0.
    order = (scores + 0.0).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :k]


def group_route(
    logits: torch.Tensor,
    w: ExpertBias,
    *,
    k: int,
    kind: str,
    groups: int,
    chosen: int,
    best_of: int,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    check_groups(experts, k, groups, chosen, best_of)
    wide = upcast(logits)
    scores = wide.softmax(-1) if kind == "softmax" else wide.sigmoid()
    ranks = scores if w.bias is None else scores + w.bias
    totals = ranks.view(tokens, groups, -1).sort(-1).values[:, :, -best_of:].sum(-1)
    kept = torch.zeros_like(totals).scatter(1, _best(totals, chosen), 1.0) > 0
    kept = kept.repeat_interleave(experts // groups, 1)
    ids = _best(ranks.masked_fill(~kept, -torch.inf), k)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=LEAST)
    return ids.int(), weights


def expert_linear(
    x: torch.Tensor, ids: torch.Tensor, w: ExpertLinear, *, is_part: bool = False
) -> torch.Tensor:
    """Compute the op, or as :attr:`~inl.spec.kernel.Kernel.run_part`."""

    def apply(rows: torch.Tensor, expert: Index) -> torch.Tensor:
        return _times(rows, w.weight, expert)

    y = grouped(x, ids, w.weight.shape[0], apply, is_part=is_part)
    return y.view(*ids.shape, -1)


def combine_experts(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (upcast(y) * weights.unsqueeze(-1)).sum(1).to(y.dtype)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Experts,
    *,
    activation: str,
    is_part: bool = False,
) -> torch.Tensor:
    """Compute the op, or as :attr:`~inl.spec.kernel.Kernel.run_part`."""

    def apply(rows: torch.Tensor, expert: Index) -> torch.Tensor:
        gate, up = _times(rows, w.gate, expert), _times(rows, w.up, expert)
        y = gated_activation(gate, up, activation=activation, inplace=True)
        return _times(y, w.down, expert)

    y = grouped(x.unsqueeze(1), ids, w.gate.shape[0], apply, is_part=is_part)
    return combine_experts(y.view(*ids.shape, -1), weights)


def grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    count: int,
    apply: Apply,
    *,
    is_part: bool = False,
) -> torch.Tensor:
    """Apply the experts ``ids`` [T, k] to the slots of ``x`` [T, 1 or k, K].

    count: E, the number of experts. is_part: whether ids may be outside of 0 to E - 1,
    of slots whose results are zeros. Returns [T * k, N].
    """
    flat = ids.flatten().long()
    repeated = flat.shape[0] // (x.shape[0] * x.shape[1])
    slots = x.flatten(0, 1)
    if x.device.type == "cpu":
        return _by_expert(slots, repeated, flat, count, apply)
    if not is_part:
        return by_static_shapes(slots, repeated, flat, count, apply)
    own = flat.clamp(0, count - 1)
    y = by_static_shapes(slots, repeated, own, count, apply)
    return y.masked_fill((own != flat).unsqueeze(1), 0)


def _times(rows: torch.Tensor, weight: torch.Tensor, expert: Index) -> torch.Tensor:
    if isinstance(expert, int):
        return product(rows, weight[expert])
    if expert is None:
        return torch.matmul(rows, weight.transpose(1, 2))
    return torch.bmm(rows, weight.index_select(0, expert).transpose(1, 2))


def _by_expert(
    slots: torch.Tensor, repeated: int, flat: torch.Tensor, count: int, apply: Apply
) -> torch.Tensor:
    """Loop over the experts that have tokens; slots of other ids have zeros."""
    flat = flat.masked_fill(flat.clamp(0, count - 1) != flat, count)
    order = flat.argsort(stable=True)
    *sizes, others = torch.bincount(flat, minlength=count + 1).tolist()
    order = order[: flat.shape[0] - others]
    parts = slots.index_select(0, order // repeated).split_with_sizes(sizes)
    outputs = [
        apply(rows, expert) for expert, rows in enumerate(parts) if rows.shape[0]
    ]
    y = torch.cat(outputs or [apply(parts[0], 0)])
    return y.new_zeros(flat.shape[0], y.shape[1]).index_copy_(0, order, y)


def by_static_shapes(
    slots: torch.Tensor, repeated: int, flat: torch.Tensor, count: int, apply: Apply
) -> torch.Tensor:
    """Group slots without data-dependent shapes; see the module docstring."""
    chosen = flat.shape[0]
    row = torch.arange(chosen, device=flat.device) // repeated
    if COPY_COST * chosen <= count:
        return apply(slots.index_select(0, row).unsqueeze(1), flat).squeeze(1)
    if slots.shape[0] <= DENSE_ROWS:
        y = apply(slots, None).flatten(0, 1)
        return y.index_select(0, flat * slots.shape[0] + row)
    return _by_block(slots, row, flat, count, apply)


def _by_block(
    slots: torch.Tensor, row: torch.Tensor, flat: torch.Tensor, count: int, apply: Apply
) -> torch.Tensor:
    """Pad to blocks of one expert, at most 2 * E: two copies of the weights."""
    size = -(-flat.shape[0] // count)
    blocks = -(-flat.shape[0] // size) + count
    position, expert = _block_layout(flat, count, size, blocks)
    source = torch.zeros(blocks * size, dtype=torch.int64, device=flat.device)
    rows = slots.index_select(0, source.index_copy_(0, position, row))
    y = apply(rows.view(blocks, size, -1), expert)
    return y.flatten(0, 1).index_select(0, position)


def _block_layout(
    flat: torch.Tensor, count: int, size: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded row of each slot and the expert of each block."""
    number = torch.arange(count, device=flat.device)
    is_chosen = (flat.unsqueeze(1) == number).long()
    rank = (is_chosen.cumsum(0) - is_chosen).gather(1, flat.unsqueeze(1)).squeeze(1)
    ends = ((is_chosen.sum(0) + size - 1) // size).cumsum(0)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    block = torch.arange(blocks, device=flat.device)
    expert = (block.unsqueeze(1) >= ends).sum(1).clamp(max=count - 1)
    return begins.index_select(0, flat) * size + rank, expert


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (upcast(x) * upcast(gate).sigmoid()).to(x.dtype)


def drop_overflow(
    ids: torch.Tensor, weights: torch.Tensor, *, experts: int, capacity: int
) -> torch.Tensor:
    index = ids.long()
    number = torch.arange(experts, device=ids.device)
    chosen = (index.unsqueeze(-1) == number).any(1).long()
    before = (chosen.cumsum(0) - chosen).gather(-1, index)
    weights = weights.masked_fill(before >= capacity, 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=LEAST)


def load_balance_loss(logits: torch.Tensor, *, k: int) -> torch.Tensor:
    scores = upcast(logits)
    tokens, count = scores.shape
    check_routing(count, k)
    chosen = torch.zeros_like(scores).scatter(-1, _best(scores.detach(), k), 1.0)
    share = chosen.sum(0) / (tokens * k)
    return count * (share * scores.softmax(-1).mean(0)).sum()


KERNELS = (
    Kernel("combine_experts", "eager", combine_experts),
    Kernel("drop_overflow", "eager", drop_overflow),
    Kernel(
        "expert_linear",
        "eager",
        expert_linear,
        run_part=partial(expert_linear, is_part=True),
    ),
    Kernel("experts", "eager", experts, run_part=partial(experts, is_part=True)),
    Kernel("group_route", "eager", group_route),
    Kernel("load_balance_loss", "eager", load_balance_loss),
    Kernel("route", "eager", route),
    Kernel("sigmoid_gate", "eager", sigmoid_gate),
)
