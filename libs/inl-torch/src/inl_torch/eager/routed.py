"""Token-routed feed-forward layer: a token id selects one expert.

Tokens are sorted by expert into blocks of equal size, each of one expert, and all
blocks are multiplied with their expert's weights in one batched product. The number of
blocks depends on shapes only, so there is no synchronization and no loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from inl.ops.routed import VOTE, TokenRoutedMlp
from inl.spec.kernel import Kernel


class TokenBlocks(NamedTuple):
    """Assignment of tokens to blocks, and of blocks to experts."""

    size: int
    """Rows of a block."""
    rows: torch.Tensor
    """[T] row of each token among the rows of all blocks."""
    experts_of_blocks: torch.Tensor
    """[blocks] expert of each block."""


def token_routed_mlp(
    x: torch.Tensor, tokens: torch.Tensor, mu: torch.Tensor, w: TokenRoutedMlp
) -> torch.Tensor:
    experts = select_experts(tokens.long(), mu, w)
    blocks = group_by_expert(experts, w.gate_up.shape[0])
    total = blocks.experts_of_blocks.shape[0] * blocks.size
    grouped = x.new_zeros((total, x.shape[1])).index_copy_(0, blocks.rows, x)
    grouped = grouped.view(-1, blocks.size, x.shape[1])
    gate_up = torch.bmm(grouped, w.gate_up.index_select(0, blocks.experts_of_blocks))
    gate, up = gate_up.chunk(2, -1)
    inner = functional.silu(gate.float()).mul_(up).to(x.dtype)
    out = torch.bmm(inner, w.down.index_select(0, blocks.experts_of_blocks))
    return out.view(total, -1).index_select(0, blocks.rows)


def select_experts(
    tokens: torch.Tensor, mu: torch.Tensor, w: TokenRoutedMlp
) -> torch.Tensor:
    """Select the expert of each token: int64 [T]."""
    count = w.gate_up.shape[0]
    base: torch.Tensor = tokens % count
    if w.experts is not None:
        base = w.experts.index_select(0, tokens).long()
    if w.router is None:
        return base
    prior = VOTE * (base[:, None] == torch.arange(count, device=base.device))
    selected: torch.Tensor = (prior + mu.float() @ w.router.float().T).argmax(-1)
    return selected


def group_by_expert(chosen: torch.Tensor, experts: int) -> TokenBlocks:
    """Group tokens by expert, into at most twice as many blocks as experts.

    chosen: [T] expert of each token. experts: their number.
    """
    tokens = chosen.shape[0]
    size = -(-tokens // experts)
    if size <= 1:
        return TokenBlocks(1, torch.arange(tokens, device=chosen.device), chosen)
    most = (tokens + min(experts, tokens) * (size - 1)) // size
    range_of_experts = torch.arange(experts, device=chosen.device)
    counts = (chosen[:, None] == range_of_experts).sum(0)
    ends = ((counts + size - 1) // size).cumsum(0)
    order = chosen.argsort(stable=True)
    owner = chosen.index_select(0, order)
    # Offset from a token's sorted index to its row, by expert.
    first = (ends - (counts + size - 1) // size) * size - (counts.cumsum(0) - counts)
    rank = torch.arange(tokens, device=chosen.device) + first.index_select(0, owner)
    rows = torch.empty_like(rank).index_copy_(0, order, rank)
    index = torch.arange(most, device=chosen.device)
    experts_of_blocks = (index[:, None] >= ends).sum(1).clamp_(max=experts - 1)
    return TokenBlocks(size, rows, experts_of_blocks)


KERNELS = (Kernel("token_routed_mlp", "eager", token_routed_mlp),)
