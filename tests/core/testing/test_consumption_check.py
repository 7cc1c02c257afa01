"""``inl check`` finds programs that keep or copy the cache that they consume."""

from __future__ import annotations

from types import SimpleNamespace

from inl.testing import consumption_checks
from planted_programs import (
    eager_backend,
    keeping,
    report,
    written_in_place,
    written_to_a_copy,
)


def keep(function, bucket, consumes):
    return keeping(function)


def test_a_cache_that_is_written_in_place_passes():
    result = report(eager_backend(written_in_place, keep))
    assert result.message == ""
    assert result.measure.ratio <= 1


def test_a_kept_cache_is_found():
    result = report(eager_backend(written_to_a_copy, keep))
    assert "cache of layer 0: can be read after the step" in result.message
    assert "keeps an argument of the program" in result.message


def test_a_copied_cache_is_found():
    result = report(eager_backend(written_to_a_copy))
    assert "cache of layer 0: found at other addresses" in result.message
    assert "copies the cache that it consumes" in result.message


def test_a_cache_that_is_copied_and_written_back_is_found(monkeypatch):
    now = 0.0  # of a clock that counts what is copied, and a time for each step

    def read():
        nonlocal now
        now += 1e-4
        return now

    def written_back(k, v, cache, writes):
        nonlocal now
        now += (cache.k.nbytes + cache.v.nbytes) / consumption_checks.COPY_SPEED
        return written_in_place(k, v, cache, writes)

    monkeypatch.setattr(consumption_checks, "time", SimpleNamespace(perf_counter=read))
    result = report(eager_backend(written_back))
    assert "step: takes" in result.message
    assert "copies the cache that it consumes" in result.message
    assert result.measure.ratio > 1
