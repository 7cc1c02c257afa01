"""Kinds of wrong kernels at the edges of sizes and values: each is found and named."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import body_kernel
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.testing.conformance import checks_of
from planted_kernels import failures, target_of
from planted_kinds import KINDS


def kernels_with(kind):
    """Return a function that lists right kernels, and the wrong one."""

    def kernels():
        for op in catalog().values():
            run = None if op.composite else body_kernel(op, "float32")
            if op.name == kind.op:
                run = kind.plant(np, run)
            if run is not None:
                yield Kernel(op.name, "planted", run)

    return kernels


def names_of(target, part):
    names = [check.name for check in checks_of(target, ["kernel"])]
    return [name for name in names if f"{part}/float32" in f"{name}/" or part in name]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_kernel_is_found_by_its_case_and_named(name):
    kind = KINDS[name]
    target = target_of(kernels_with(kind), only=(kind.op,))
    found = [
        finding
        for case in names_of(target, kind.case)
        for finding in failures(target, "kernel", case)
    ]
    assert found
    text = "\n".join(found[0].lines())
    assert f"{kind.op}/planted" in text
    assert kind.case in text


@pytest.mark.parametrize("op", sorted({kind.op for kind in KINDS.values()}))
def test_a_right_kernel_passes_these_cases(op):
    kernels = kernels_with(KINDS["1,024 products"]._replace(plant=lambda _, run: run))
    target = target_of(kernels, only=(op,))
    cases = {kind.case for kind in KINDS.values() if kind.op == op}
    for case in cases:
        for name in names_of(target, case):
            assert failures(target, "kernel", name) == []
