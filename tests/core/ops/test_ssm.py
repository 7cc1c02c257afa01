"""The scan of Mamba-2: its composition against loops, its range, and its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.ops import catalog
from inl.spec.dispatch import DynamicOps
from inl.spec.selection import KernelSelection, select_kernel
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import judge, truth
from inl.spec.tree import tree_map

SCAN = catalog()["ssm_scan"]
CASES = list(SCAN.cases(np.random.default_rng(31)))


def scanned(x, b, c, dt, table, step, w):
    """The recurrence, one number of time after the other."""
    out, after = x * w.skip[:, None], table.copy()
    after[0] = 0
    share = x.shape[1] // b.shape[1]
    for row in range(int(step.used_counts[1])):
        span = range(int(step.starts[row]), int(step.starts[row + 1]))
        slot = step.slots[row]
        for head in range(x.shape[1]):
            matrix = table[slot, head] * (step.positions[span[0]] != 0)
            for t in span:
                z = dt[t, head] + w.shift[head]
                time = max(z, 0) + math.log1p(math.exp(-abs(z)))
                keep = math.exp(-math.exp(w.rate[head]) * time)
                added = np.outer(b[t, head // share], time * x[t, head])
                matrix = keep * matrix + added
                out[t, head] += c[t, head // share] @ matrix
            after[slot, head] = matrix
    return out, after


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_body_is_the_recurrence(case):
    found, want = truth(SCAN, case, "float64"), scanned(*case.args)
    for got, exact in zip(found, want, strict=True):
        assert np.abs(got - exact).max() < 1e-12 * np.abs(exact).max()


def test_cases_forget_everything():
    """Some tokens leave nothing of the state before them, and most leave some."""
    case = next(case for case in CASES if "long" in case.name and "decays" in case.name)
    dt, w = case.args[3], case.args[6]
    kept = np.exp(-np.exp(w.rate) * np.logaddexp(0, dt + w.shift))
    assert 0.05 < (kept < 1e-38).mean() < 0.5
    assert (kept > 0.1).mean() > 0.1


def test_float16_needs_a_kernel_of_the_op():
    """The composition takes the range of float32 or bfloat16."""
    case = CASES[0]
    kernels = KernelSelection(tuple(ReferenceBackend(Device("reference:0")).kernels()))
    for dtype, how in (("bfloat16", "composed"), ("float16", "missing")):
        specs = tree_map(
            lambda x, dtype=dtype: StrictArray(np.shape(x), dtype), case.args
        )
        choice = select_kernel(SCAN, specs, {}, kernels)
        assert choice.how == how
    (refusal,) = choice.refusals
    assert refusal == (
        "ssm_scan/composed",
        "needs the range of bfloat16 or float32 or float64, found float16",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_error_of_eight_percent_is_found(dtype):
    """The bound in float16 is not that of intermediate results that vanish."""
    case = next(case for case in CASES if case.name == "mixed/2x4")
    out, table = truth(SCAN, case, dtype)
    assert judge(SCAN, case, dtype, (out, table)).passed
    assert not judge(SCAN, case, dtype, (1.08 * out, table)).passed
    assert not judge(SCAN, case, dtype, (out, 1.08 * table)).passed


def test_the_composition_runs_on_other_backends_in_float32():
    case = CASES[0]
    ops = DynamicOps(ReferenceBackend(Device("reference:0")).kernels())
    args = tree_map(
        lambda x: x.astype("f4") if x.dtype == "f8" else x.copy(), case.args
    )
    verdict = judge(SCAN, case, "float32", ops.ssm_scan(*args))
    assert verdict.passed, str(verdict)
