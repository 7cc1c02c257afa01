"""Mixture of experts on torch: methods with static shapes, ties, NaN, gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import RequestError
from inl.models import mixtral, qwen2_moe, qwen3_moe
from inl.ops import catalog
from inl.ops.moe import Experts
from inl.ops.moe_cases import choice, matrices, shares
from inl.spec.limits import Limits
from inl.spec.tolerance import judge
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, local_runner
from inl.testing.traffic import Traffic, play
from inl.weights.sources import stored_tensors
from inl_torch.eager import moe

DTYPES = ("float32", "bfloat16", "float16")


METHODS = {"every": 128, "block": 0}
"""Methods with static shapes -> value of DENSE_ROWS that selects them."""


@pytest.fixture(params=METHODS)
def static_shapes(request, monkeypatch):
    """Use a method with static shapes on the CPU."""
    monkeypatch.setattr(moe, "_by_expert", moe.by_static_shapes)
    monkeypatch.setattr(moe, "DENSE_ROWS", METHODS[request.param])


def verdicts(name, run, dtype, seed, on_torch, on_host):
    spec = catalog()[name]
    for case in spec.cases(np.random.default_rng(seed)):
        result = run(*on_torch(spec, case, dtype), **case.attrs)
        yield case.name, judge(spec, case, dtype, on_host(result))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["expert_linear", "experts"])
@pytest.mark.usefixtures("static_shapes")
def test_device_methods_err_no_more_than_rounding(name, dtype, seed, on_torch, on_host):
    run = getattr(moe, name)
    for case, found in verdicts(name, run, dtype, seed, on_torch, on_host):
        assert found.passed, f"{case} in {dtype}, seed {seed}: {found}"


@pytest.mark.parametrize("count", [1, 2, 7, 60])
@pytest.mark.parametrize("tokens", [1, 3, 50, 333])
def test_all_methods_agree_for_uneven_loads(tokens, count, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    k = min(2, count)
    w = Experts(*(torch.from_numpy(m) for m in matrices(rng, count, 6, 8)))
    x = torch.from_numpy(rng.standard_normal((tokens, 8)))
    weights = torch.from_numpy(shares(rng, tokens, k))
    loads = [choice(rng, tokens, count, k)]
    loads.append(np.tile(np.arange(count - k, count, dtype=np.int32), (tokens, 1)))
    for ids in map(torch.from_numpy, loads):
        wanted = moe.experts(x, ids, weights, w, activation="gelu_tanh")
        for rows in METHODS.values():
            with monkeypatch.context() as patch:
                patch.setattr(moe, "_by_expert", moe.by_static_shapes)
                patch.setattr(moe, "DENSE_ROWS", rows)
                found = moe.experts(x, ids, weights, w, activation="gelu_tanh")
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_blocks_take_no_more_than_twice_the_rows(monkeypatch):
    """Shapes do not depend on the routing."""
    monkeypatch.setattr(moe, "DENSE_ROWS", 0)
    seen = []

    def apply(rows, expert):
        seen.append((tuple(rows.shape), tuple(expert.shape)))
        return rows

    for count, chosen in ((8, 6), (8, 40), (128, 1000), (128, 129)):
        for flat in (torch.zeros(chosen), torch.arange(chosen) % count):
            rows = torch.arange(chosen, dtype=torch.float32).unsqueeze(1)
            found = moe.by_static_shapes(rows, 1, flat.long(), count, apply)
            assert torch.equal(found, rows)
        one, other = seen[-2:]
        assert one == other
        blocks, size, _ = one[0]
        assert blocks <= 2 * count
        assert blocks * size <= chosen + size * (count + 1)


def shifted(x, ids, weights, w, *, activation):
    return moe.experts(x, ids.flip(0), weights, w, activation=activation)


def swapped(x, ids, weights, w, *, activation):
    other = Experts(w.up, w.gate, w.down)
    return moe.experts(x, ids, weights, other, activation=activation)


def test_overflow_of_an_unselected_expert_has_no_effect(monkeypatch):
    """All experts compute all rows; overflow must not affect tokens of other
    experts."""
    monkeypatch.setattr(moe, "_by_expert", moe.by_static_shapes)
    gate = torch.ones(2, 3, 4)
    gate[1] = torch.inf
    w = Experts(gate, torch.ones(2, 3, 4), torch.ones(2, 4, 3))
    ids = torch.tensor([[0], [1], [0]], dtype=torch.int32)
    found = moe.experts(torch.ones(3, 4), ids, torch.ones(3, 1), w, activation="silu")
    assert found.isfinite().all(1).tolist() == [True, False, True]


def even(x, ids, weights, w, *, activation):
    same = torch.full_like(weights, 1 / weights.shape[1])
    return moe.experts(x, ids, same, w, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [shifted, swapped, even])
def test_a_wrong_kernel_is_found(wrong, dtype, seed, on_torch, on_host):
    found = verdicts("experts", wrong, dtype, seed, on_torch, on_host)
    assert not all(one.passed for _, one in found), f"seed {seed}"


def unstable(logits, *, k, kind, renormalize):
    """A possible order of ties by ``topk``."""
    ids, weights = moe.route(logits.flip(-1), k=k, kind=kind, renormalize=renormalize)
    return logits.shape[-1] - 1 - ids, weights


def test_a_router_with_other_ties_is_found(seed, on_torch, on_host):
    found = verdicts("route", unstable, "float32", seed, on_torch, on_host)
    failed = [case for case, one in found if not one.passed]
    assert failed == ["ties", "vanishing"]


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax", "sigmoid"])
def test_nan_in_a_router_stays_in_its_row(kind, seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((5, 6)).astype(np.float32)
    logits[2, 4] = np.nan
    attrs = {"k": 2, "kind": kind, "renormalize": True}
    wanted = catalog()["route"].body(logits, **attrs)
    found = moe.route(torch.from_numpy(logits), **attrs)
    np.testing.assert_array_equal(found[0].numpy(), wanted[0])
    np.testing.assert_allclose(found[1].numpy(), wanted[1], rtol=1e-5)
    assert np.isnan(found[1].numpy()).any(1).tolist() == [
        False,
        False,
        True,
        *2 * [False],
    ]


def test_k_above_the_experts_is_refused():
    with pytest.raises(RequestError, match=r"k: found 7, accepted: 1 to 6"):
        moe.route(torch.zeros(2, 6), k=7, kind="sigmoid", renormalize=False)


def test_the_gradient_of_the_loss_is_that_of_finite_differences(seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((6, 4))
    given = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    moe.load_balance_loss(given, k=2).backward()
    body, step = catalog()["load_balance_loss"].body, 1e-6
    for place in np.ndindex(*logits.shape):
        moved = np.zeros_like(logits)
        moved[place] = step
        slope = body(logits + moved, k=2) - body(logits - moved, k=2)
        assert float(given.grad[place]) == pytest.approx(slope / 2 / step, abs=1e-6)


LIMITS = Limits(
    slots=7, blocks=(60,), block_size=4, max_blocks_per_seq=10, vocab=70, depth=64
)
SIZES = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}


def random_files(model, seed):
    rng, tensors = np.random.default_rng(seed), {}
    for group in leaves(model.weights(model.config(SIZES))):
        for param in group.params.values():
            for name, shape in stored_tensors(param).items():
                numbers = 1.4 * rng.standard_normal(shape) / shape[-1] ** 0.5
                tensors[name] = numbers.astype(np.float32)
    return MemoryCheckpoint(SIZES, tensors)


@pytest.fixture(params=[mixtral, qwen2_moe, qwen3_moe], ids=lambda m: m.__name__[11:])
def model(request):
    return request.param.MODEL


def frames(steps=15):
    return Traffic(np.random.default_rng(2), LIMITS).frames(steps)


def test_a_step_of_a_mixture_never_synchronizes(model, meta_backend):
    """Meta tensors have no data, so reading it, or shapes that depend on it, raise."""
    runner = local_runner(meta_backend, model, random_files(model, 1), LIMITS)
    for sent in frames():
        runner.submit(sent.message)


@pytest.mark.parametrize("form", ["by expert", *METHODS])
def test_tokens_of_a_mixture_are_the_references(model, form, backend, monkeypatch):
    files = random_files(model, 3)
    reference = ReferenceBackend(Device("reference"), dtype="float64")
    wanted = play(
        local_runner(reference, model, files, LIMITS, dtype="float64"), frames()
    )
    if form in METHODS:
        monkeypatch.setattr(moe, "_by_expert", moe.by_static_shapes)
        monkeypatch.setattr(moe, "DENSE_ROWS", METHODS[form])
    found = play(local_runner(backend, model, files, LIMITS), frames())
    assert found == wanted
    assert sum(map(len, found.values())) > 15
