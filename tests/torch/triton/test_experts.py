"""Expert kernels, with few and many slots, against the float64 bodies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import DTYPES, PLACE

from inl.ops import catalog
from inl.ops.moe import ExpertLinear, Experts
from inl.ops.moe_cases import choice, matrices, shares
from inl.spec.op import Case
from inl.spec.tolerance import judge

# isort: split
from inl_torch.triton.moe import experts as ours

KERNELS = {kernel.op: kernel for kernel in ours.KERNELS}
SIZES = {
    "one token": (1, 8, 2, 20, 100),
    "16 tokens": (16, 8, 2, 9, 24),
    "17 tokens": (17, 8, 2, 33, 48),
    "most experts idle": (50, 20, 1, 20, 70),
    "full tiles": (96, 3, 2, 65, 40),
}
"""Tokens, experts, experts per token, I and H."""


def poison():
    """Fill memory that later tensors will reuse with NaN."""
    spoiled = [torch.full((size,), float("nan"), device=PLACE) for size in 8 * [65536]]
    del spoiled


def check(op, case, dtype, on_torch, on_host, seed, *, run="run"):
    arguments = on_torch(catalog()[op], case, dtype, PLACE)
    refused = KERNELS[op].refuse(*arguments, **case.attrs)
    assert refused is None, refused
    poison()
    got = on_host(getattr(KERNELS[op], run)(*arguments, **case.attrs))
    verdict = judge(catalog()[op], case, dtype, got)
    assert verdict.passed, f"{op}/{case.name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIZES)
def test_experts(name, dtype, seed, on_torch, on_host):
    rng, (tokens, count, k, inner, hidden) = np.random.default_rng(seed), SIZES[name]
    x, ids = rng.standard_normal((tokens, hidden)), choice(rng, tokens, count, k)
    w = Experts(*matrices(rng, count, inner, hidden))
    args = x, ids, shares(rng, tokens, k), w
    activation = "silu" if tokens % 2 else "gelu_tanh"
    case = Case(name, args, {"activation": activation})
    check("experts", case, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIZES)
def test_expert_linear(name, dtype, seed, on_torch, on_host):
    rng, (tokens, count, k, inner, hidden) = np.random.default_rng(seed), SIZES[name]
    ids = choice(rng, tokens, count, k)
    weight = rng.standard_normal((count, inner, hidden)) / hidden**0.5
    for slots in {1, k}:
        x = rng.standard_normal((tokens, slots, hidden))
        case = Case(f"{name}/{slots}", (x, ids, ExpertLinear(weight)))
        check("expert_linear", case, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("name", ["one token", "17 tokens", "most experts idle"])
def test_experts_of_other_ranks_add_nothing(name, seed, on_torch, on_host):
    rng, (tokens, count, k, inner, hidden) = np.random.default_rng(seed), SIZES[name]
    x, ids = rng.standard_normal((tokens, hidden)), choice(rng, tokens, count, k)
    ids = (ids - count // 4).astype(np.int32)  # of a rank with the middle half
    w = Experts(*matrices(rng, count // 2, inner, hidden))
    case = Case(name, (x, ids, shares(rng, tokens, k), w), {"activation": "silu"})
    check("experts", case, "float32", on_torch, on_host, seed, run="run_part")
    case = Case(name, (x[:, None], ids, ExpertLinear(w.gate)))
    check("expert_linear", case, "float32", on_torch, on_host, seed, run="run_part")


def test_a_wrong_expert_is_found(seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    ids = choice(rng, 50, 4, 2)
    weight = rng.standard_normal((4, 20, 48))
    case = Case("wrong", (rng.standard_normal((50, 1, 48)), ids, ExpertLinear(weight)))
    x, chosen, w = on_torch(catalog()["expert_linear"], case, "bfloat16", PLACE)
    chosen[31] = chosen[31].flip(0)
    got = on_host(KERNELS["expert_linear"].run(x, chosen, w))
    assert not judge(catalog()["expert_linear"], case, "bfloat16", got).passed


def test_refusals():
    ids, w = torch.zeros(1, 2), ExpertLinear(torch.zeros(5000, 1, 1))
    refused = KERNELS["expert_linear"].refuse(torch.zeros(1, 1, 1), ids, w)
    assert "takes 4096 experts at most, found 5000" in refused
    assert "found float64" in KERNELS["combine_experts"].refuse(
        torch.zeros(1, 1, 1).double(), ids
    )
