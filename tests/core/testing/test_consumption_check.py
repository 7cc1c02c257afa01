"""``inl check`` finds programs that keep or copy the cache that they consume."""

from __future__ import annotations

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
    assert "copies the cache that it consumes" in result.message
    assert result.measure.ratio > 1
