"""A feed-forward layer of which each token uses one expert, chosen by its id.

Tokens are sorted by expert into blocks of one size, each of one expert, and every block
meets its expert's weights in one batched product. The number of blocks follows from the
sizes alone, so nothing waits for the device and there is no loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from inl.ops.routed import VOTE, TokenRoutedMlp
from inl.spec.kernel import Kernel


class Blocks(NamedTuple):
    """Where each token lies among the blocks, and whose each block is."""

    size: int
    """Rows of a block."""
    places: torch.Tensor
    """[T] row of each token among those of all blocks."""
    owners: torch.Tensor
    """[blocks] expert of each block."""


def token_routed_mlp(
    x: torch.Tensor, tokens: torch.Tensor, mu: torch.Tensor, w: TokenRoutedMlp
) -> torch.Tensor:
    chosen = chosen_experts(tokens.long(), mu, w)
    found = blocks(chosen, w.gate_up.shape[0])
    rows = found.owners.shape[0] * found.size
    grouped = x.new_zeros((rows, x.shape[1])).index_copy_(0, found.places, x)
    grouped = grouped.view(-1, found.size, x.shape[1])
    gate_up = torch.bmm(grouped, w.gate_up.index_select(0, found.owners))
    gate, up = gate_up.chunk(2, -1)
    inner = functional.silu(gate.float()).mul_(up).to(x.dtype)
    out = torch.bmm(inner, w.down.index_select(0, found.owners))
    return out.view(rows, -1).index_select(0, found.places)


def chosen_experts(
    tokens: torch.Tensor, mu: torch.Tensor, w: TokenRoutedMlp
) -> torch.Tensor:
    """The expert of each token: int64 [T]."""
    count = w.gate_up.shape[0]
    base: torch.Tensor = tokens % count
    if w.experts is not None:
        base = w.experts.index_select(0, tokens).long()
    if w.router is None:
        return base
    votes = VOTE * (base[:, None] == torch.arange(count, device=base.device))
    found: torch.Tensor = (votes + mu.float() @ w.router.float().T).argmax(-1)
    return found


def blocks(chosen: torch.Tensor, experts: int) -> Blocks:
    """Group tokens by expert; so many as make as many blocks as experts, or twice."""
    tokens = chosen.shape[0]
    size = -(-tokens // experts)
    if size <= 1:
        return Blocks(1, torch.arange(tokens, device=chosen.device), chosen)
    most = (tokens + min(experts, tokens) * (size - 1)) // size
    range_of_experts = torch.arange(experts, device=chosen.device)
    counts = (chosen[:, None] == range_of_experts).sum(0)
    ends = ((counts + size - 1) // size).cumsum(0)
    order = chosen.argsort(stable=True)
    owner = chosen.index_select(0, order)
    # A token's rank among its expert's, counted from the expert's first block.
    first = (ends - (counts + size - 1) // size) * size - (counts.cumsum(0) - counts)
    rank = torch.arange(tokens, device=chosen.device) + first.index_select(0, owner)
    places = torch.empty_like(rank).index_copy_(0, order, rank)
    index = torch.arange(most, device=chosen.device)
    owners = (index[:, None] >= ends).sum(1).clamp_(max=experts - 1)
    return Blocks(size, places, owners)


KERNELS = (Kernel("token_routed_mlp", "eager", token_routed_mlp),)
