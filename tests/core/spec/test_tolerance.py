"""The error bound of kernels accepts rounding and rejects errors."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from inl.dtypes import EPSILON, rounded
from inl.ops import catalog
from inl.spec.activation_quant import ACTIVATION_QUANTS, INT8
from inl.spec.op import Case
from inl.spec.tolerance import judge, storage_run, truth
from inl.spec.tree import leaves, tree_map

DTYPES = ("float64", "float32", "bfloat16", "float16")
LINEAR = catalog()["linear"]


def cases():
    """In float64; at full depth in one more dtype by turns, at long depth in all."""
    turns = cycle(DTYPES[1:])
    for name, spec in catalog().items():
        for case in spec.cases(np.random.default_rng(1)):
            marks = {"float64": (), next(turns): pytest.mark.full}
            for dtype in DTYPES:
                yield pytest.param(
                    spec, case, dtype, id=f"{name}-{case.name}-{dtype}",
                    marks=marks.get(dtype, pytest.mark.long),
                )  # fmt: skip


@pytest.mark.parametrize(("spec", "case", "dtype"), list(cases()))
def test_the_body_with_storage_rounding_passes(spec, case, dtype):
    verdict = judge(spec, case, dtype, storage_run(spec, case, dtype))
    assert verdict.passed, str(verdict)


def one_row(rng):
    x, w = rng.standard_normal((1, 64)), rng.standard_normal((48, 64))
    return Case("one row", (x, LINEAR.weights(w)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("share", "passes"), [(0.98, True), (1.02, False)])
def test_a_bias_of_the_size_of_the_tolerance_is_detected(dtype, share, passes):
    case = one_row(np.random.default_rng(2))
    exact = truth(LINEAR, case, dtype)
    # The verdict reports the bound, so it must be above 0.
    bound = judge(LINEAR, case, dtype, exact + 1e-14).bound
    rounding = np.abs(storage_run(LINEAR, case, dtype) - exact).max()
    units = 8 if dtype in ("float64", "float32") else 1
    floor = units * EPSILON[dtype] * np.abs(exact).max()
    assert bound == pytest.approx(2 * rounding + floor, rel=1e-6)
    assert judge(LINEAR, case, dtype, exact + share * bound).passed == passes
    assert judge(LINEAR, case, dtype, exact - share * bound).passed == passes


def test_one_wrong_element_in_one_row_is_detected():
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((33, 64)), rng.standard_normal((48, 64))
    case = Case("rows", (x, LINEAR.weights(w)))
    result = truth(LINEAR, case, "float32").astype(np.float32)
    assert judge(LINEAR, case, "float32", result).passed
    result[17, 5] *= 1.001
    assert not judge(LINEAR, case, "float32", result).passed


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_rows_are_judged_by_their_own_size(scale):
    """An error in a small row is detected beside a large row."""
    x = np.array([[1.0, 2.0], [1.0, 2.0]])
    x[1] *= scale
    case = Case("sizes", (x, LINEAR.weights(np.eye(2))))
    result = truth(LINEAR, case, "float32")
    result[np.argmin(np.abs(x[:, 0]))] *= 1.01
    assert not judge(LINEAR, case, "float32", result).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_detected(bad):
    case = one_row(np.random.default_rng(4))
    result = truth(LINEAR, case, "bfloat16")
    result[0, 7] = bad
    verdict = judge(LINEAR, case, "bfloat16", result)
    assert not verdict.passed
    kind = "NaN" if np.isnan(bad) else "infinite"
    assert f"1 of {result.size} values is {kind} at [0, 7]: found {bad}," in str(
        verdict
    )


def test_wrong_shapes_and_counts_are_detected():
    case = one_row(np.random.default_rng(5))
    exact = truth(LINEAR, case, "float32")
    verdict = judge(LINEAR, case, "float32", exact[0])
    assert not verdict.passed
    assert verdict.problem == f"shape {exact[0].shape}, expected {exact.shape}"
    verdict = judge(LINEAR, case, "float32", (exact, exact))
    assert "2 results, expected 1" in verdict.problem
    assert not verdict.passed


def test_an_expected_nan_is_accepted():
    route = catalog()["route"]
    attrs = {"k": 1, "kind": "softmax_topk", "renormalize": False}
    case = Case("lost", (np.array([[1.0, np.nan, 2.0], [1.0, 0.0, 2.0]]),), attrs)
    ids, weights = truth(route, case, "float32")
    assert np.isnan(weights[0]).all()
    assert judge(route, case, "float32", (ids, weights)).passed
    assert not judge(route, case, "float32", (ids, np.where(weights, 0, 0))).passed


@pytest.mark.parametrize("terms", [64, 4096])
def test_sums_in_order_are_accepted_and_narrower_products_are_not(terms):
    rng = np.random.default_rng(8)
    x, weight = np.abs(rng.standard_normal((2, 6, terms))).astype(np.float32)
    case = Case("sum", (x.astype(float), LINEAR.weights(weight.astype(float))))
    total = np.add.accumulate(x[:, None] * weight[None], axis=-1)[..., -1]
    assert judge(LINEAR, case, "float32", total).passed
    tf32 = (x.view(np.uint32) & 0xFFFFE000).view(np.float32)
    assert not judge(LINEAR, case, "float32", tf32 @ weight.T).passed


def test_integers_are_exact():
    spec = catalog()["make_step"]
    case = next(iter(spec.cases(np.random.default_rng(6))))
    result = spec.body(*case.args, **case.attrs)
    assert judge(spec, case, "float32", result).passed
    count = len(list(leaves(result)))
    for wrong in range(count):
        index = iter(range(count))
        changed = tree_map(
            lambda leaf, index=index, wrong=wrong: leaf + (next(index) == wrong), result
        )
        assert not judge(spec, case, "float32", changed).passed, wrong


def test_inputs_are_rounded_before_the_truth_is_computed():
    x = np.array([[1 + 2.0**-9]])
    case = Case("rounded", (x, LINEAR.weights(np.eye(1))))
    assert truth(LINEAR, case, "bfloat16") == 1
    assert truth(LINEAR, case, "float32") == x


def test_int8_groups_match_hand_computed_values():
    x = np.zeros((1, 40))
    x[0, :3] = 127, 2.4, -0.6  # the first group's unit is 1
    x[0, 32:34] = -12.7, 0.26  # that of the last, short one 0.1
    found = ACTIVATION_QUANTS[INT8](x)
    np.testing.assert_allclose(found[0, :3], [127, 2, -1], rtol=1e-12)
    np.testing.assert_allclose(found[0, 32:34], [-12.7, 0.3], rtol=1e-12)
    assert found.shape == x.shape
    assert (found[0, 3:32] == 0).all()


def coarse_run(case, scale):
    """The product with every input off by ``scale`` times the int8 rounding error."""
    x, w = (np.asarray(part, np.float64) for part in (case.args[0], case.args[1][0]))
    x = rounded(x, "bfloat16").astype(np.float64)
    w = rounded(w, "bfloat16").astype(np.float64)
    return (x + scale * (ACTIVATION_QUANTS[INT8](x) - x)) @ w.T


def test_declared_activation_quantization_widens_the_bound_by_its_error():
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((9, 256)), rng.standard_normal((64, 256))
    x[:, ::32] *= 30  # one number of each group leaves the others few digits
    case = Case("many", (x, LINEAR.weights(w)))
    found = coarse_run(case, 1.0)
    assert judge(LINEAR, case, "bfloat16", found, INT8).passed
    assert not judge(LINEAR, case, "bfloat16", found).passed
    assert not judge(LINEAR, case, "bfloat16", coarse_run(case, 4.0), INT8).passed


def test_the_reference_ignores_activation_quantization():
    rng = np.random.default_rng(4)
    case = one_row(rng)
    exact = truth(LINEAR, case, "float64")
    assert judge(LINEAR, case, "float64", exact, INT8).error == 0
