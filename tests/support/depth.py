"""Test depth: the environment variable INL_TEST_DEPTH, ``quick`` (default) or ``full``.

Tests marked ``full`` run only at full depth. Tests marked ``scaled`` run at both, with
more examples, seeds or steps at full depth: those that take the ``depth`` fixture are
marked automatically, property tests by :func:`examples`. A full run in an environment
where the quick run has passed needs only ``-m "full or scaled"``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

VARIABLE = "INL_TEST_DEPTH"
DEPTHS = ("quick", "full")

DEPTH = os.environ.get(VARIABLE, "quick")
if DEPTH not in DEPTHS:
    raise pytest.UsageError(f"{VARIABLE}: found {DEPTH!r}; accepted: quick, full")


def scaled(quick, full):
    """Return the value for the current depth; mark the test ``scaled`` as well."""
    return full if DEPTH == "full" else quick


def examples(quick, full, **options):
    """Decorate a property test: ``max_examples`` by depth, no per-example deadline."""
    count = scaled(quick, full)

    def decorate(test):
        limited = settings(max_examples=count, deadline=None, **options)(test)
        return pytest.mark.scaled(limited)

    return decorate


def mostly_full(values, quick=1):
    """Parametrize over ``values``: the first ``quick`` of them at every depth."""
    return [
        value if at < quick else pytest.param(value, marks=pytest.mark.full)
        for at, value in enumerate(values)
    ]
