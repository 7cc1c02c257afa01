"""Failures are grouped by the kernel at fault."""

from __future__ import annotations

from inl.testing.check import Fault, Result
from inl.testing.findings import findings


def failed(name, kernel=None, kind="value", calls=(), section="kernel"):
    fault = Fault(kernel, kind, frozenset(calls)) if kernel else None
    return Result(section, name, "failed", f"message of {name}", fault=fault)


def names(results):
    return [
        (finding.first.name, [r.name for r in finding.same], len(finding.callers))
        for finding in findings(results)
    ]


def test_a_kernel_is_listed_once_with_its_callers():
    results = [
        Result("kernel", "linear/1", "passed"),
        failed("linear/2", "linear/toy"),
        failed("linear/3", "linear/toy"),
        failed("gated_mlp/1", "gated_mlp (composed)", calls=["linear/toy"]),
        failed("gated_mlp/2", "gated_mlp/toy"),
    ]
    assert names(results) == [("linear/2", ["linear/3"], 1), ("gated_mlp/2", [], 0)]


def test_kinds_of_faults_of_one_kernel_are_apart():
    results = [
        failed("linear/1", "linear/toy", "dtype"),
        failed("linear/2", "linear/toy", "value"),
    ]
    assert names(results) == [("linear/1", [], 0), ("linear/2", [], 0)]


def test_the_runner_and_the_engine_follow_kernels():
    whole = [
        failed("runner/logits", section="runner"),
        failed("engine/batched", section="engine"),
    ]
    assert names(whole) == [("runner/logits", [], 0), ("engine/batched", [], 0)]
    results = [failed("linear/1", "linear/toy"), *whole]
    assert names(results) == [
        ("linear/1", [], 0),
        ("runner/logits", ["engine/batched"], 0),
    ]


def test_a_missing_kernel_is_listed_once_with_a_count():
    count = 38
    results = [failed(f"check/{i}", "rms_norm", "missing") for i in range(count)]
    (finding,) = findings(results)
    assert list(finding.lines()) == [
        "failed  check/0",
        "        message of check/0",
        "        found by 37 more checks (check/1, check/2, check/3, ...)",
    ]
