"""Cleanup that is called again while exceptions interrupt it."""

from __future__ import annotations

import pytest

from inl.engine.cleanup import ATTEMPTS, run_with_cleanup


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("interrupts", range(ATTEMPTS))
def test_cleanup_is_completed(fails, interrupts):
    calls = []

    def work():
        return 1 / (not fails)

    def cleanup():
        calls.append("begun")
        if calls.count("begun") <= interrupts:
            raise KeyboardInterrupt
        calls.append("completed")

    if fails or interrupts:
        with pytest.raises(ZeroDivisionError if fails else KeyboardInterrupt):
            run_with_cleanup(work, cleanup)
    else:
        assert run_with_cleanup(work, cleanup) == 1
    assert calls == ["begun"] * (interrupts + 1) + ["completed"]


def test_a_cleanup_that_always_fails_raises_its_error():
    with pytest.raises(LookupError):
        run_with_cleanup(lambda: 1 / 0, lambda: {}["x"])
