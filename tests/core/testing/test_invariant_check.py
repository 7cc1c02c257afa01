"""The check of the invariant mode finds kernels that only claim to be invariant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.spec.tree import tree_map
from inl.testing import invariant_checks as checks
from inl.testing.check import CheckFailed
from inl.testing.engine_checks import engine_checks
from inl.testing.invariant_checks import (
    INVARIANT,
    missing_kernels,
    same_bits,
    serves_invariant,
)
from inl.testing.oracle import Tiny
from inl.testing.target import Target


def widened(run):
    """A kernel in float64: rounded to float32, the order of additions is not seen."""

    def wide(leaf):
        array = np.asarray(leaf)
        return array.astype(np.float64) if array.dtype == np.float32 else leaf

    def compute(*args, **attrs):
        result = run(*(tree_map(wide, each) for each in args), **attrs)
        return result.astype(np.float32)

    return compute


def shifted(run):
    """A kernel whose bits depend on the number of rows."""

    def compute(x, *args, **attrs):
        factor = np.float32(1 + 1e-6 * (len(x) % 2))
        return widened(run)(x, *args, **attrs) * factor

    return compute


def claiming(monkeypatch, **changes):
    """A model on the reference backend, all of whose kernels claim to be invariant."""
    sound = ReferenceBackend.kernels

    def kernels(self):
        for kernel in sound(self):
            change = changes.get(kernel.op)
            if change is None and kernel.op in ("linear", "attention"):
                change = widened
            run = change(kernel.run) if change else kernel.run
            yield replace(kernel, run=run, invariant=True)

    monkeypatch.setattr(ReferenceBackend, "kernels", kernels)
    return Tiny(Target(Device("reference"), seed=3), "float32")


def test_kernels_that_do_not_depend_on_the_batch_pass(monkeypatch):
    tiny = claiming(monkeypatch)
    assert serves_invariant(tiny)
    same_bits(tiny)


@pytest.mark.parametrize("op", ["linear", "attention", "rms_norm"])
def test_a_kernel_that_depends_on_the_batch_is_found(monkeypatch, op):
    tiny = claiming(monkeypatch, **{op: shifted})
    with pytest.raises(CheckFailed, match=r"invariant, .*expected the bits of the req"):
        same_bits(tiny)
    with pytest.raises(CheckFailed, match=r"in chunks of .* has other bits"):
        checks._same_logits(tiny, list(range(30)), np.random.default_rng(0))


def test_a_backend_without_such_kernels_is_not_checked():
    target = Target(Device("reference"), seed=3)
    assert "linear" in missing_kernels(target)
    assert not serves_invariant(Tiny(target, "float32"))
    names = [check.name for check in engine_checks(target)]
    assert not any(name.startswith(INVARIANT) for name in names)
