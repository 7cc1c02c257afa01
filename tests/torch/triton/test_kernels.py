"""Every Triton kernel against the float64 bodies.

Compiled where there is a GPU, else in Triton's interpreter, in a subprocess that
``test_interpreted.py`` starts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_steps import attention_cases
from triton_place import DTYPES, IS_SLOW, PLACE

from inl.ops import catalog
from inl.ops.attention import random_step
from inl.ops.full_attention import starts_of
from inl.ops.linear import Linear
from inl.spec.cache import Cache
from inl.spec.dispatch import DynamicOps
from inl.spec.op import Case
from inl.spec.tolerance import judge

# isort: split
from inl_torch import eager
from inl_torch import triton as ours
from inl_torch.triton.attention import attention, wide_heads
from inl_torch.triton.matmul import linear, mlp
from inl_torch.triton.tuning import Tuning

KERNELS = tuple(ours.kernels(Tuning(filters=True)))


def poison():
    """Fill memory that later tensors will reuse with NaN."""
    spoiled = [torch.full((size,), float("nan"), device=PLACE) for size in 8 * [65536]]
    del spoiled


def run(name, case, dtype, on_torch, on_host):
    spec = catalog()[name]
    arguments = on_torch(spec, case, dtype, PLACE)
    poison()
    call = getattr(DynamicOps((*KERNELS, *eager.kernels())), name)
    return judge(spec, case, dtype, on_host(call(*arguments, **case.attrs)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted({kernel.op for kernel in KERNELS} | {"attend"}))
def test_triton_errs_no_more_than_rounding(name, dtype, seed, on_torch, on_host):
    for case in catalog()[name].cases(np.random.default_rng(seed)):
        verdict = run(name, case, dtype, on_torch, on_host)
        assert verdict.passed, f"{name}/{case.name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_splits_groups_and_tails(dtype, seed, on_torch, on_host):
    spec, tuning = catalog()["attention"], Tuning()
    for case in attention_cases(np.random.default_rng(seed), both=not IS_SLOW):
        q, cache, step = on_torch(spec, case, dtype, PLACE)
        poison()
        out = attention.attention(q, cache, step, **case.attrs, tuning=tuning)
        verdict = judge(spec, case, dtype, on_host(out))
        assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"
        assert not out[int(step.used_counts[2]) :].any(), f"padding of {case.name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_sequences_whose_heads_are_no_power_of_two(
    window, dtype, seed, on_torch, on_host
):
    rng, lengths, padding = np.random.default_rng(seed), (150, 0, 1, 70), 9
    tokens = sum(lengths) + padding
    q = rng.standard_normal((tokens, 2, 72))
    k, v = rng.standard_normal((2, tokens, 1, 72))
    case = Case("72", (q, k, v, starts_of(lengths)), {"scale": 0.1, "window": window})
    verdict = run("full_attention", case, dtype, on_torch, on_host)
    assert verdict.passed, f"{dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 4])
def test_wide_heads(parts, dtype, seed, on_torch, on_host, monkeypatch):
    monkeypatch.setattr(wide_heads, "parts_of", lambda _: parts)
    rng, spec, tuning = np.random.default_rng(seed), catalog()["attention"], Tuning()
    step, blocks = random_step(rng, [40, 3, 0, 17], [1, 1, 5, 9], block_size=4)
    for heads, kv_heads in ((18, 1), (4, 2)):
        q = rng.standard_normal((step.tokens.shape[0], heads, 40))
        cache = Cache(*rng.standard_normal((2, blocks, 4, kv_heads, 40)))
        attrs = {"scale": 0.2, "window": None, "cap": None, "group": 0}
        case = Case(f"{heads} heads", (q, cache, step), attrs)
        q, cache, given = on_torch(spec, case, dtype, PLACE)
        poison()
        out = wide_heads.attention(q, cache, given, **attrs, tuning=tuning)
        verdict = judge(spec, case, dtype, on_host(out))
        assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_of_the_default_models_sizes(dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for n, k in ((320, 576), (193, 1536), (5, 1030)):
        w = Linear(rng.standard_normal((n, k)), rng.standard_normal(n))
        case = Case(f"{n}x{k}", (rng.standard_normal((1, k)), w))
        verdict = run("linear", case, dtype, on_torch, on_host)
        assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"


STREAMED = Tuning(max_rows=32, max_outputs=0, max_streamed_rows=32)
"""Streams the matrices of all products of several rows."""


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each != "float32"])
def test_streamed_products(dtype, seed, on_torch, on_host):
    rng, spec = np.random.default_rng(seed), catalog()["linear"]
    for tokens, n, k in ((3, 37, 300), (8, 64, 512), (17, 130, 129)):
        w = Linear(rng.standard_normal((n, k)), rng.standard_normal(n))
        case = Case(f"{tokens}x{n}x{k}", (rng.standard_normal((tokens, k)), w))
        x, weights = on_torch(spec, case, dtype, PLACE)
        apart = torch.cat((x, x), 1)[:, :k]
        poison()
        got = linear.linear(apart, weights, tuning=STREAMED)
        verdict = judge(spec, case, dtype, on_host(got))
        assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tuning", [Tuning(max_rows=8), STREAMED], ids=["one", "many"])
def test_a_packed_mlp(tuning, activation, dtype, seed, on_torch, on_host):
    rng, spec = np.random.default_rng(seed), catalog()["gated_mlp"]
    for tokens in (1, 5):
        x = rng.standard_normal((tokens, 48))
        gate, up, down = (
            rng.standard_normal(s) for s in ((96, 48), (96, 48), (48, 96))
        )
        w = catalog()["gated_mlp"].weights(gate, up, down)
        case = Case(f"{tokens}", (x, w), {"activation": activation})
        given, weights = on_torch(spec, case, dtype, PLACE)
        packed = mlp.StackedMlp(torch.cat((weights.gate, weights.up)), weights.down)
        poison()
        got = mlp.gated_mlp(given, packed, activation=activation, tuning=tuning)
        verdict = judge(spec, case, dtype, on_host(got))
        assert verdict.passed, f"{tokens} {dtype}, seed {seed}: {verdict}"


def test_a_wrong_kernel_is_found(seed, on_torch, on_host):
    spec, verdicts = catalog()["attention"], []
    for case in spec.cases(np.random.default_rng(seed)):
        q, cache, step = on_torch(spec, case, "bfloat16", PLACE)
        late = step._replace(positions=step.positions + 1)
        got = on_host(
            attention.attention(q, cache, late, **case.attrs, tuning=Tuning())
        )
        verdicts.append(judge(spec, case, "bfloat16", got).passed)
    assert not all(verdicts), f"seed {seed}"


def test_refuses_wide_rows():
    kernel = next(k for k in KERNELS if k.op == "rms_norm")
    assert "16384 at most" in kernel.refuse(torch.zeros(1, 16385), None, eps=1e-5)
    assert "float64" in kernel.refuse(torch.zeros(1, 4).double(), None, eps=1e-5)
    kernel = next(k for k in KERNELS if (k.op, k.name) == ("linear", "triton"))
    w, x = Linear(torch.zeros(3, 4)), torch.zeros(9, 4, dtype=torch.bfloat16)
    assert "1 rows at most, found 9" in kernel.refuse(x, w)
