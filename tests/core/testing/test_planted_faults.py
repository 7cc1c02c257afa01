"""Twelve wrong kernels of a NumPy backend: ``inl check`` finds and names each."""

from __future__ import annotations

import pytest

import planted_faults
from planted_faults import PLANTED, eager_backend, matches, quotations, report


def test_the_comparison_can_fail():
    assert matches("a ... c\nd\n", ["a b c", "d"])
    assert not matches("a ... c\n", ["a b c", "d"])
    assert not matches("a\n", ["b"])


def test_the_page_has_a_section_for_each_fault():
    assert len(quotations()) == len(PLANTED) == 12


@pytest.mark.parametrize(
    ("fault", "row"), list(zip(PLANTED, quotations(), strict=True))
)
def test_a_fault_is_reported_as_the_page_quotes(fault, row):
    heading, quoted = row
    lines = report(eager_backend, fault)
    assert matches(quoted, lines), f"{heading}\n" + "\n".join(lines)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_same_backend_without_the_fault_passes(fault, monkeypatch):
    planted = PLANTED[fault]
    right = planted._replace(wrong=lambda _xp, run: run, name="")
    monkeypatch.setitem(planted_faults.PLANTED, fault, right)
    assert report(eager_backend, fault, only=(planted.op,)) == []


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_found_on_other_seeds(fault, seed):
    lines = report(eager_backend, fault, seed=seed)
    assert any(PLANTED[fault].op in line for line in lines)
