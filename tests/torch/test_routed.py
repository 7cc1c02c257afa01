"""Token-routed experts: blocks of tokens, without a loop over experts."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inl.ops.routed import TokenRoutedMlp
from inl_torch.eager import routed


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def layer(experts, *, hidden=6, inner=4):
    make = torch.Generator().manual_seed(experts)
    sizes = (experts, hidden, 2 * inner), (experts, inner, hidden), (experts, hidden)
    return TokenRoutedMlp(*(torch.randn(size, generator=make) for size in sizes))


def calls(tokens, experts):
    x = torch.ones(tokens, 6)
    with Counting() as counting:
        routed.token_routed_mlp(x, torch.arange(tokens), x, layer(experts))
    return counting.calls


def test_the_number_of_calls_does_not_grow():
    assert calls(50, 4) == calls(5000, 4) == calls(5000, 64)
    assert calls(1, 4) == calls(64, 64) < calls(50, 4)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 9, 64, 97])
@pytest.mark.parametrize("experts", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["random", "one expert", "last expert", "sorted"])
def test_every_token_is_in_a_block_of_its_expert(tokens, experts, kind):
    chosen = {
        "random": torch.randint(experts, (tokens,)),
        "one expert": torch.zeros(tokens, dtype=torch.long),
        "last expert": torch.full((tokens,), experts - 1),
        "sorted": torch.randint(experts, (tokens,)).sort().values,
    }[kind]
    found = routed.group_by_expert(chosen, experts)
    rows = found.experts_of_blocks.numel() * found.size
    assert len(set(found.rows.tolist())) == tokens
    assert all(0 <= place < rows for place in found.rows.tolist())
    assert torch.equal(found.experts_of_blocks[found.rows // found.size], chosen)
    assert rows <= 2 * tokens + experts
