"""Results of single checks, and gaps."""

from __future__ import annotations

import math

import pytest

from inl.errors import RequestError
from inl.testing.check import (
    Check,
    CheckFailed,
    Measure,
    check_gaps,
    gap_of,
    perform,
    worst,
)
from inl.testing.conformance import check_all
from planted_kernels import target_of


def passing():
    return Measure(1.0, 4.0)


def failing():
    raise CheckFailed("found 3, expected 4", Measure(3.0, 2.0))


def crashing():
    raise KeyError("slot")


def outcome(run, gaps=()):
    found = perform(Check("kernel", "rms_norm/heads/float32", run), dict(gaps))
    return found.status, found.message


def test_a_check_passes_with_its_measure():
    found = perform(Check("kernel", "x/y", passing), {})
    assert (found.status, found.message, found.measure.ratio) == ("passed", "", 0.25)


def test_a_failure_carries_the_message_of_the_check():
    assert outcome(failing) == ("failed", "found 3, expected 4")
    found = perform(Check("kernel", "x/y", failing), {})
    assert found.measure == Measure(3.0, 2.0)


def test_any_exception_is_a_failure():
    assert outcome(crashing) == ("failed", "raised KeyError: 'slot'")


GAPS = {"rms_norm/heads": "strided rows land in driver 2.1"}


def test_a_gap_replaces_a_failure_by_its_reason():
    assert outcome(failing, GAPS) == ("gap", "strided rows land in driver 2.1")


def test_a_gap_that_passes_has_expired():
    status, message = outcome(passing, GAPS)
    assert status == "failed"
    assert message == (
        "rms_norm/heads/float32 passes: the gap 'rms_norm/heads' has expired; "
        "remove or narrow it"
    )


def test_a_gap_covers_whole_parts_of_a_name():
    gaps = {"rms_norm": "a", "rms_norm/heads": "b", "rms": "c"}
    assert gap_of("rms_norm/heads/float32", gaps) == "rms_norm/heads"
    assert gap_of("rms_norm/zeros", gaps) == "rms_norm"
    assert gap_of("rms_norms/zeros", gaps) is None


@pytest.mark.parametrize("gaps", [{"rms_nrom": "why"}, {"rms": "why"}])
def test_a_gap_that_covers_nothing_is_refused(gaps):
    with pytest.raises(RequestError, match=r"covers no check; accepted:.*rms_norm"):
        check_gaps(gaps, ["rms_norm/heads/float32"])


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_a_gap_needs_a_reason(reason):
    with pytest.raises(RequestError, match="the reason is empty"):
        check_gaps({"rms_norm": reason}, ["rms_norm/heads"])


def test_known_gaps_are_accepted():
    check_gaps(GAPS, ["rms_norm/heads/float32"])


def test_worst_has_the_largest_ratio_to_its_bound():
    measures = [Measure(5.0, 100.0), Measure(0.0, 0.0), Measure(1.0, 2.0)]
    assert worst(measures) == Measure(1.0, 2.0)
    assert worst([*measures, Measure(1.0, 0.0)]).ratio == math.inf


def test_the_checks_of_a_section_are_run_by_its_name():
    target = target_of(only=("silu",))
    whole = check_all(target, names=["kernel"])
    assert {result.section for result in whole} == {"kernel"}
    assert len(whole) == len(check_all(target))
    (one,) = check_all(target, names=["silu/edges/float32"])
    assert one.name == "silu/edges/float32"
    with pytest.raises(RequestError, match="accepted: a section of backend, kernel"):
        check_all(target, names=["kernels"])
