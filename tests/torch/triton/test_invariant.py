"""Batch-invariant Triton kernels: their results, and the bits of a row in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_steps import DIMS
from triton_place import DTYPES, PLACE

from inl.ops import catalog
from inl.ops.attention import random_step
from inl.ops.linear import Linear
from inl.spec.cache import Cache
from inl.spec.dispatch import DynamicOps
from inl.spec.op import Case
from inl.spec.selection import KernelSelection
from inl.spec.tolerance import judge

# isort: split
from inl_torch import eager
from inl_torch import triton as ours
from inl_torch.triton.matmul import invariant
from inl_torch.triton.tuning import Tuning

KERNELS = (*eager.kernels(), *ours.kernels(Tuning(filters=True)))
OPS = DynamicOps(KernelSelection(KERNELS, invariant=True))
LLAMA = {
    "admit", "all_gather", "all_reduce", "attention", "embedding", "expand_rows",
    "gated_activation", "linear", "make_step", "prune_last_layer", "reduce_add_norm",
    "rms_norm", "rope", "rope_table", "sample", "score", "take_rows", "verify",
    "write_kv", "zeros_like",
}  # fmt: skip
"""Primitive ops of a Llama."""


def test_a_llama_has_a_kernel_of_every_op():
    marked = {kernel.op for kernel in KERNELS if kernel.invariant}
    assert sorted(LLAMA - marked) == []
    assert {"qkv_linear", "gated_mlp", "lora", "qkv_lora", "gated_lora"} <= marked


def compute(name, case, dtype, on_torch):
    arguments = on_torch(catalog()[name], case, dtype, PLACE)
    return getattr(OPS, name)(*arguments, **case.attrs), arguments


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_rows(dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    w = Linear(rng.standard_normal((70, 150)), rng.standard_normal(70))
    case = Case("70", (rng.standard_normal((66, 150)), w))
    together, (x, weights) = compute("linear", case, dtype, on_torch)
    verdict = judge(catalog()["linear"], case, dtype, on_host(together))
    assert verdict.passed, f"{dtype}, seed {seed}: {verdict}"
    for count in (1, 5):
        assert torch.equal(OPS.linear(x[-count:], weights), together[-count:]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_layer(dtype, seed, on_torch, on_host):
    rng, spec = np.random.default_rng(seed), catalog()["gated_mlp"]
    parts = (rng.standard_normal(s) for s in ((40, 48), (40, 48), (48, 40)))
    x = rng.standard_normal((5, 48))
    case = Case("5", (x, spec.weights(*parts)), {"activation": "silu"})
    given, w = on_torch(spec, case, dtype, PLACE)
    packed = invariant.StackedMlp(torch.cat((w.gate, w.up)), w.down)
    together = invariant.gated_mlp(given, packed, activation="silu")
    verdict = judge(spec, case, dtype, on_host(together))
    assert verdict.passed, f"{dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
def test_attention_of_any_chunks(window, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for heads, kv_heads, dim in DIMS[1:3]:
        step, blocks = random_step(rng, [33, 5, 70], [1, 20, 1], block_size=16)
        q = rng.standard_normal((step.tokens.shape[0], heads, dim))
        cache = Cache(*rng.standard_normal((2, blocks, 16, kv_heads, dim)))
        attrs = {"scale": dim**-0.5, "window": window, "cap": None, "group": 0}
        case = Case(f"{heads}x{dim}", (q, cache, step), attrs)
        together, (q, cache, step) = compute("attention", case, dtype, on_torch)
        verdict = judge(catalog()["attention"], case, dtype, on_host(together))
        assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"
        # The last tokens of the second row as a step of their own.
        for count in (1, 3):
            alone = step._replace(
                tokens=step.tokens[21 - count : 21],
                positions=step.positions[21 - count : 21],
                rows=torch.zeros_like(step.rows[:count]),
                starts=torch.tensor([0, count]).to(step.starts),
                lengths=step.lengths[1:2],
                slots=step.slots[1:2],
                blocks=step.blocks[:, 1:2],
                used_counts=torch.tensor([0, 1, count]).to(step.used_counts),
                plan=(),
            )
            found = OPS.attention(q[21 - count : 21], cache, alone, **attrs)
            assert torch.equal(found, together[21 - count : 21]), (window, count)
