"""Checks accept a correct backend that adds in plain float32, whatever the seed."""

from __future__ import annotations

import pytest

from depth import scaled
from inl.device import Device
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.target import DEFAULT_SEED, Target, default_seed
from plain_float32 import plain_backend

SUMS = ("attend", "attention", "linear", "norm_mlp", "norm_qkv", "rms_norm")
"""Ops with the longest sums."""


@pytest.mark.parametrize("seed", [2, 3, *scaled([], [DEFAULT_SEED, 4, 5, 6, 7, 8])])
def test_sums_in_order_pass_every_check(seed):
    only = scaled(SUMS[:3] if seed == 3 else SUMS[3:], ())
    target = Target(Device("plain:0"), seed=seed, only=only)
    # The registry has no such device: the target uses this backend.
    target.__dict__["backend"] = plain_backend(target.device)
    results = [perform(check, {}) for check in checks_of(target, ["kernel"])]
    assert len(results) > 30
    assert [r.message for r in results if r.status == "failed"] == []


def test_the_seed_is_fixed_and_the_environment_changes_it(monkeypatch):
    monkeypatch.delenv("INL_CHECK_SEED", raising=False)
    assert Target(Device("plain:0")).seed == default_seed() == DEFAULT_SEED == 16
    monkeypatch.setenv("INL_CHECK_SEED", "5")
    assert Target(Device("plain:0")).seed == 5


def test_a_full_check_runs_larger_sizes():
    def names(full):
        target = Target(Device("plain:0"), full=full, only=("attention", "linear"))
        target.__dict__["backend"] = plain_backend(target.device)
        return {check.name for check in checks_of(target, ["kernel"])}

    more = names(True) - names(False)
    assert "attention/context 4100/6/2x64/float32" in more
    assert "linear/33x96x160/bias/1030 rows/float32" in more
    assert names(False) < names(True)
