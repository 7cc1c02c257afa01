"""Routing and sorting of slots against the float64 bodies and NumPy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import DTYPES, PLACE

from inl.ops import catalog
from inl.ops.group_route import ExpertBias
from inl.spec.op import Case
from inl.spec.tolerance import judge

# isort: split
from inl_torch.triton.moe import routing, sorting

KERNELS = {kernel.op: kernel for kernel in routing.KERNELS}


def check(op, case, dtype, on_torch, on_host, seed):
    spec, kernel = catalog()[op], KERNELS[op]
    arguments = on_torch(spec, case, dtype, PLACE)
    assert kernel.refuse(*arguments, **case.attrs) is None
    got = on_host(kernel.run(*arguments, **case.attrs))
    verdict = judge(spec, case, dtype, got)
    assert verdict.passed, f"{op}/{case.name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", KERNELS)
def test_every_case(op, dtype, seed, on_torch, on_host):
    for case in catalog()[op].cases(np.random.default_rng(seed)):
        check(op, case, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax", "sigmoid"])
def test_models_with_many_experts(kind, seed, on_torch, on_host):
    """Many logits are equal: they have few bits."""
    logits = np.random.default_rng(seed).integers(-9, 9, (3, 300)) / 4
    attrs = {"k": 10, "kind": kind, "renormalize": True}
    check("route", Case(kind, (logits,), attrs), "float32", on_torch, on_host, seed)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(value, seed, on_host):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((5, 6)).astype(np.float32)
    logits[1, [2, 4]], logits[3] = value, value
    for kind in ("softmax_topk", "topk_softmax", "sigmoid"):
        attrs = {"k": 6, "kind": kind, "renormalize": False}
        ids, weights = catalog()["route"].body(logits, **attrs)
        there = torch.from_numpy(logits).to(PLACE)
        found = on_host(KERNELS["route"].run(there, **attrs))
        np.testing.assert_array_equal(found[0], ids, f"{kind}, seed {seed}")
        np.testing.assert_allclose(found[1], weights, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_groups_stay_distinct_with_nan(on_host):
    """Ids index the matrices: each is an expert, whatever the logits are."""
    logits = torch.full((2, 12), float("nan"), device=PLACE)
    logits[0, 5] = 1
    for kind in ("sigmoid", "softmax"):
        ids, weights = on_host(
            KERNELS["group_route"].run(
                logits, ExpertBias(), k=4, kind=kind, groups=3, chosen=2, best_of=2,
                renormalize=True,
            )
        )  # fmt: skip
        for row in ids:
            assert len(set(row)) == 4
            assert 0 <= row.min() <= row.max() < 12
        assert np.isnan(weights).all()


@pytest.mark.parametrize(
    ("slots", "count"), [(1, 1), (7, 300), (64, 8), (3 * 4096 + 5, 6)]
)
def test_slots_are_sorted_stably(slots, count, seed, on_host):
    rng = np.random.default_rng(seed)
    for ids in (
        rng.integers(0, count, (slots, 1), np.int32),
        np.full((slots, 1), count - 1, np.int32),
    ):
        found = sorting.sort_by_expert(torch.from_numpy(ids).to(PLACE), count)
        order, counts = on_host(tuple(found))
        flat = ids.ravel()
        np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
        np.testing.assert_array_equal(counts, np.bincount(flat, minlength=count))


def test_refusals():
    wide = torch.zeros(1, 5000)
    assert "takes 4096 experts at most, found 5000" in KERNELS["route"].refuse(wide)
    assert "found float64" in KERNELS["group_route"].refuse(wide[:, :5].double())
    assert "found float64" in KERNELS["sigmoid_gate"].refuse(wide.double(), wide)
