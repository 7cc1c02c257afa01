"""Kernel launches of one block of a mixture of experts on a GPU; needs none.

    python bench/moe_launches.py

The block is run on small CPU tensors, with the launches of Triton's kernels suppressed
and counted, and with every call of torch counted that is neither a view nor an
allocation. Such a call may take several launches: a sort takes at least two.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from inl.models import blocks, deepseek_v3, gpt_oss, moe, qwen2_moe, qwen3_moe
from inl.spec.dispatch import DynamicOps
from inl.spec.op import CATALOG
from inl.spec.tree import tree_map
from inl.spec.weights import Group
from inl_torch import eager, triton
from inl_torch.triton.tuning import Tuning

ROWS = (1, 8, 64, 2048)
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "moe_intermediate_size": 32, "head_dim": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0,
    "head_dim": 8,
}  # fmt: skip
MODELS = {
    "Qwen3-30B-A3B, 8 of 128": (
        qwen3_moe, moe.mixture, {"num_experts": 128, "num_experts_per_tok": 8},
    ),
    "Qwen1.5-MoE, 4 of 60 and a shared one": (
        qwen2_moe, moe.mixture,
        {"num_experts": 60, "num_experts_per_tok": 4,
         "shared_expert_intermediate_size": 64},
    ),
    "DeepSeek-V3, 8 of 256 in groups and a shared one": (
        deepseek_v3, moe.mixture,
        LATENT | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
                  "topk_group": 4, "n_shared_experts": 1,
                  "routed_scaling_factor": 2.5},
    ),
    "GPT-OSS 20B, 4 of 32": (
        gpt_oss, gpt_oss.mixture, {"num_local_experts": 32, "num_experts_per_tok": 4},
    ),
}  # fmt: skip
"""Module, function of the block, and sizes that decide which kernels are launched."""

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty")


class Calls(TorchDispatchMode):
    """Counts calls of torch that compute or copy."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        aliased = [result.alias_info for result in func._schema.returns]
        is_view = any(alias and not alias.is_write for alias in aliased)
        if not is_view and name not in ALLOCATIONS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count launches by kernel; Triton's do not run."""
    counts: Counter[str] = Counter()

    def run(self: Any, *_args: Any, **_options: Any) -> None:
        counts[self.fn.__name__] += 1

    with mock.patch.object(JITFunction, "run", run), Calls(counts):
        yield counts


def block(name: str, rows: int) -> Callable[[], Any]:
    """Return a call of the block of a model with ``rows`` rows in bfloat16."""
    module, mixture, sizes = MODELS[name]
    config = module.MODEL.config(SMALL | sizes)

    def weights(group: Group) -> Any:
        tensors = {
            key: torch.ones(param.shape, dtype=torch.bfloat16)
            for key, param in group.params.items()
        }
        return CATALOG[group.op].weights(**tensors)

    w = tree_map(weights, module.MODEL.weights(config).layers[0].mlp)
    x = torch.ones(rows, config.hidden_size, dtype=torch.bfloat16)
    ops = DynamicOps((*eager.kernels(), *triton.kernels(Tuning())))
    return partial(mixture, ops, config, w, blocks.Carry(x, x, x, x))


def launches(name: str, rows: int) -> Counter[str]:
    """Return the launches of a model's block, by kernel."""
    call = block(name, rows)
    with counted() as counts, torch.inference_mode():
        call()
    return counts


def main() -> int:
    print(" | ".join(["block", *(f"{rows} rows" for rows in ROWS)]))
    for name in MODELS:
        found = [launches(name, rows) for rows in ROWS]
        print(" | ".join([name, *(str(each.total()) for each in found)]))
        print("   ", dict(found[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
