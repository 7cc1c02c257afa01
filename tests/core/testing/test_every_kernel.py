"""Kernels are checked too where another one is preferred."""

from __future__ import annotations

import pytest

from inl.backend.reference import ReferenceBackend, body_kernel
from inl.device import Device
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.selection import KernelSelection
from inl.testing.check import CheckFailed
from inl.testing.kernel_checks import kernel_checks
from inl.testing.target import Target


def checks(*kernels):
    """Checks by name of a backend with these kernels of the op linear."""
    target = Target(Device("reference"), only=("linear",))
    backend = ReferenceBackend(target.device)
    vars(target).update(backend=backend, selection=KernelSelection(kernels))
    return {check.name: check.run for check in kernel_checks(target)}


def kernel(name, run, **more):
    return Kernel("linear", name, run, **more)


RIGHT = body_kernel(catalog()["linear"], "float32")


def wrong(x, w):
    return RIGHT(x, w) * 1.01


def few(x, _w):
    return f"takes 1 row, found {x.shape[0]}" if x.shape[0] > 1 else None


def test_a_wrong_kernel_is_found_where_another_is_preferred():
    found = checks(kernel("right", RIGHT, preference=1), kernel("wrong", wrong))
    own = [name for name in found if name.startswith("linear/by wrong/")]
    assert len(own) >= len(list(catalog()["linear"].cases(Target(Device("x")).rng())))
    for name in own:
        with pytest.raises(CheckFailed, match="linear/wrong"):
            found[name]()
    assert not [name for name in found if "by right" in name]


def test_cases_that_a_kernel_refuses_or_computes_anyway_are_left_out():
    found = checks(
        kernel("few", RIGHT, preference=1, refuse=few), kernel("many", RIGHT)
    )
    own = [name for name in found if "/by " in name]
    assert own
    assert all(name.startswith("linear/by many/") for name in own)
    cases = [name for name in found if name.count("/") == 2 and "refusals" not in name]
    assert len(own) < len(cases)
    for name in own:
        found[name]()
