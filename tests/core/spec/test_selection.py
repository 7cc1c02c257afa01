"""Kernel selection, its refusals, and resolved ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from inl.errors import NoKernel
from inl.ops import catalog
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import Norm
from inl.spec.dispatch import DynamicOps, ResolvedOps, Tracer
from inl.spec.kernel import Kernel
from inl.spec.selection import KernelSelection, select_kernel
from inl.spec.step import Bucket, Step
from inl.spec.strict_array import StrictArray

BUCKET = Bucket(4, 2)
BODIES = {name: spec.body for name, spec in catalog().items()}


def strict(*shape, layout="plain"):
    return StrictArray(shape, "float32", layout=layout)


def linear_site(inner=8, layout="plain"):
    return strict(4, inner), Linear(strict(3, inner, layout=layout))


def kernel(name, op="linear", run=None, **more):
    return Kernel(op, name, run or BODIES[op], **more)


def choose(policy, op="linear", args=None, **attrs):
    return select_kernel(catalog()[op], args or linear_site(), attrs, policy)


def policy(*kernels, **more):
    return KernelSelection(kernels, device_name="npu:0", **more)


def tracer_of(*kernels, **more):
    return Tracer(policy(*kernels, **more), BUCKET, 4)


def test_native():
    choice = choose(policy(kernel("a")))
    assert (choice.how, choice.winner, choice.refusals) == ("native", "linear/a", ())


def test_the_highest_preference_wins_and_others_are_refused():
    choice = choose(policy(kernel("a"), kernel("b", preference=2), kernel("c")))
    assert choice.winner == "linear/b"
    lost = "has a lower preference than linear/b"
    assert choice.refusals == (("linear/a", lost), ("linear/c", lost))


def test_a_refusal_is_recorded_and_the_next_kernel_wins():
    refuses = kernel("a", preference=9, refuse=lambda x, w: f"rows of {x.shape[-1]}")
    choice = choose(policy(refuses, kernel("b")))
    assert choice.winner == "linear/b"
    assert choice.refusals == (("linear/a", "rows of 8"),)


def test_refuse_receives_attributes():
    picky = kernel("a", "rms_norm", refuse=lambda x, w, *, eps: f"eps {eps}")
    choice = choose(policy(picky), "rms_norm", (strict(4, 8), Norm(strict(8))), eps=0.5)
    assert choice.refusals == (("rms_norm/a", "eps 0.5"),)


def test_composed():
    args = strict(4, 8), QkvLinear(strict(6, 8), strict(2, 8), strict(2, 8))
    assert choose(policy(kernel("a")), "qkv_linear", args).how == "composed"


def test_hosted_only_where_allowed():
    assert choose(policy()).how == "missing"
    assert choose(policy(host=lambda spec: spec.body)).how == "hosted"


def test_missing_lists_every_refusal():
    tracer = tracer_of(
        kernel("a", refuse=lambda *_: "rows wider than 4"),
        kernel("b", refuse=lambda *_: "needs a TPU"),
        kernel("c", "rms_norm"),
    )
    tracer.linear(*linear_site())
    with pytest.raises(NoKernel) as caught:
        ResolvedOps(tracer)
    assert str(caught.value) == (
        "no kernel for linear on npu:0\n"
        "  linear/a: rows wider than 4\n"
        "  linear/b: needs a TPU"
    )


def test_missing_without_candidates_suggests_allow_hosted():
    tracer = tracer_of()
    tracer.linear(*linear_site())
    with pytest.raises(
        NoKernel, match="no kernel is registered; try allow_hosted=True"
    ):
        ResolvedOps(tracer)


def test_invariant_mode_refuses_other_kernels():
    fast, steady = kernel("fast", preference=9), kernel("steady", invariant=True)
    choice = choose(policy(fast, steady, invariant=True))
    assert choice.winner == "linear/steady"
    assert choice.refusals[0][0] == "linear/fast"
    assert "not batch-invariant" in choice.refusals[0][1]
    assert choose(policy(fast, invariant=True)).how == "missing"


def test_a_kernel_is_refused_for_another_weight_layout():
    plain, tiled = kernel("plain", preference=9), kernel("tiled", layout="tiles")
    packed = choose(policy(plain, tiled), args=linear_site(layout="tiles"))
    assert packed.winner == "linear/tiled"
    expected = "takes weights in layout plain, found tiles"
    assert packed.refusals == (("linear/plain", expected),)
    unpacked = choose(policy(tiled))
    assert unpacked.refusals[0][1] == "takes weights in layout tiles, found plain"


def test_a_composite_with_packed_weights_is_neither_composed_nor_hosted():
    w = QkvLinear(*(strict(n, 8, layout="rows") for n in (6, 2, 2)))
    choice = choose(
        policy(kernel("a"), host=lambda spec: spec.body),
        "qkv_linear",
        (strict(4, 8), w),
    )
    assert choice.how == "missing"


def test_rows_of_a_part_of_the_step_may_use_another_kernel():
    """The last layer computes the sampled tokens only, with the same weights."""
    ran = []

    def run(name):
        return lambda x, w: ran.append(name) or BODIES["linear"](x, w)

    few = kernel(
        "few", run=run("few"), preference=1,
        refuse=lambda x, w: "more than 2 rows" if x.shape[0] > 2 else None,
    )  # fmt: skip
    tracer = tracer_of(few, kernel("many", run=run("many")))
    for rows in (BUCKET.tokens, BUCKET.rows):
        tracer.linear(strict(rows, 8), linear_site()[1])
    ops, w = ResolvedOps(tracer), Linear(np.ones((3, 8)))
    for exact in (BUCKET, Bucket(7, 2)):
        for rows in (exact.tokens, exact.rows):
            ops.at(exact).linear(np.ones((rows, 8)), w)
    assert ran == ["many", "few"] * 2


def test_two_call_sites_of_an_op_may_use_two_kernels():
    ran = []

    def run(name):
        def linear(x, w):
            ran.append(name)
            return BODIES["linear"](x, w)

        return linear

    narrow = kernel(
        "narrow", run=run("narrow"), preference=1,
        refuse=lambda x, w: "more than 8 columns" if x.shape[-1] > 8 else None,
    )  # fmt: skip
    tracer = tracer_of(narrow, kernel("wide", run=run("wide")))
    tracer.linear(*linear_site(8))
    tracer.linear(*linear_site(16))
    tracer.linear(*linear_site(8))
    assert sorted(tracer.counts.values()) == [1, 2]
    ops = ResolvedOps(tracer)
    rng = np.random.default_rng(0)
    for inner, name in ((16, "wide"), (8, "narrow")):
        x, weight = rng.standard_normal((4, inner)), rng.standard_normal((3, inner))
        # Any number of rows: sites differ by inner sizes only.
        for rows in (4, 1):
            found = ops.linear(x[:rows], Linear(weight))
            assert np.allclose(found, x[:rows] @ weight.T)
            assert ran.pop() == name
    assert ran == []


def test_real_weights_are_dispatched_by_their_layout():
    class Tiles(NamedTuple):
        weight: Any

        @property
        def layout(self):
            return "tiles"

    tiled = kernel("tiled", run=lambda x, w: x @ w.weight, layout="tiles")
    tracer = tracer_of(kernel("plain"), tiled)
    tracer.linear(*linear_site())
    tracer.linear(*linear_site(layout="tiles"))
    ops = ResolvedOps(tracer)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, 8)), rng.standard_normal((3, 8))
    assert np.allclose(ops.linear(x, Linear(weight)), x @ weight.T)
    assert np.allclose(ops.linear(x, Tiles(weight.T)), x @ weight.T)


def test_composed_ops_call_the_resolved_kernels():
    tracer = tracer_of(kernel("double", run=lambda x, w: 2 * (x @ w.weight.T)))
    tracer.qkv_linear(strict(4, 8), QkvLinear(strict(6, 8), strict(2, 8), strict(2, 8)))
    ops = ResolvedOps(tracer)
    x, w = np.ones((4, 8)), QkvLinear(*(np.ones((n, 8)) for n in (6, 2, 2)))
    for twin in (ops, ops.at(Bucket(9, 3))):
        assert [float(part[0, 0]) for part in twin.qkv_linear(x, w)] == [16.0] * 3
    assert ops.at(Bucket(9, 3)).bucket == Bucket(9, 3)
    assert ops.bucket == BUCKET


def test_ops_inside_a_native_composite_are_not_resolved():
    whole = kernel("whole", "qkv_linear", run=lambda x, w: (x, x, x))
    tracer = tracer_of(whole)
    result = tracer.qkv_linear(
        strict(4, 8), QkvLinear(strict(6, 8), strict(2, 8), strict(2, 8))
    )
    assert [part.shape for part in result] == [(4, 6), (4, 2), (4, 2)]
    assert [name for name, _ in tracer.counts] == ["qkv_linear"]
    assert ResolvedOps(tracer).qkv_linear(1, 2) == (1, 1, 1)


def test_hosted_ops_run_the_host_implementation():
    tracer = tracer_of(host=lambda spec: lambda *args, **attrs: f"hosted {spec.name}")
    tracer.linear(*linear_site())
    assert ResolvedOps(tracer).linear(0, 0) == "hosted linear"


def test_ops_are_frozen():
    ops = ResolvedOps(tracer_of())
    with pytest.raises(AttributeError, match="ops are frozen: cannot set 'linear'"):
        ops.linear = print
    with pytest.raises(AttributeError, match="op 'rope' was not called when the model"):
        ops.rope  # noqa: B018


def test_each_planner_runs_once_a_step():
    planned = []

    def plan(step, *, block_size):
        planned.append((step, block_size))
        return "work list"

    attending = kernel("x", "attention", plan=plan)
    tracer = tracer_of(attending)
    attrs = {"scale": 1.0, "window": None, "cap": None, "group": 0}
    step = Step(*(strict(4) for _ in range(12)))
    for _ in range(3):
        tracer.attention(strict(4, 2, 8), (strict(1, 4, 2, 8),) * 2, step, **attrs)
    assert ResolvedOps(tracer).plan("step", block_size=4) == {
        "attention/x": "work list"
    }
    assert planned == [("step", 4)]


def test_dynamic_ops_select_a_kernel_per_call():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 8)), Linear(rng.standard_normal((3, 8)))
    ops = DynamicOps([kernel("a")])
    assert np.array_equal(ops.linear(x, w), x @ w.weight.T)
    q, _, _ = ops.qkv_linear(x, QkvLinear(w.weight, w.weight, w.weight))
    assert np.array_equal(q, x @ w.weight.T)
    with pytest.raises(NoKernel, match="rms_norm"):
        ops.rms_norm(x, Norm(np.ones(8)), eps=1e-5)
    with pytest.raises(AttributeError, match="no op 'flash'; the catalog has"):
        ops.flash  # noqa: B018
    hosting = DynamicOps(policy(host=lambda spec: spec.body))
    assert np.array_equal(hosting.linear(x, w), x @ w.weight.T)
