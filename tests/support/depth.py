"""Test depth: the environment variable INL_TEST_DEPTH, ``quick`` (default), ``full`` or
``long``, which is ``full`` with more steps of the random tests.

Tests marked ``full`` run only at full depth. Tests marked ``scaled`` run at both, with
more examples, seeds or steps at full depth: property tests and those that take the
``depth`` fixture are marked automatically. A full run in an environment where the quick
run has passed needs only ``-m "full or scaled"``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

VARIABLE = "INL_TEST_DEPTH"
DEPTHS = ("quick", "full", "long")

DEPTH = os.environ.get(VARIABLE, "quick")
if DEPTH not in DEPTHS:
    raise pytest.UsageError(
        f"{VARIABLE}: found {DEPTH!r}; accepted: {', '.join(DEPTHS)}"
    )


def scaled(quick, full, long=None):
    """Return the value for the current depth; ``long`` is ``full`` by default."""
    if DEPTH == "long" and long is not None:
        return long
    return quick if DEPTH == "quick" else full


# A deadline for each example would fail on a busy machine.
settings.register_profile("inl", deadline=None, max_examples=scaled(30, 100))
settings.load_profile("inl")


def examples(quick, full, **options):
    """Decorate a property test: the number of examples by depth."""
    return settings(max_examples=scaled(quick, full), **options)


def mostly_full(values, quick=1, mark=pytest.mark.full):
    """Parametrize over ``values``: the first ``quick`` of them at every depth."""
    return [
        value if at < quick else pytest.param(value, marks=mark)
        for at, value in enumerate(values)
    ]


def mostly_long(values):
    """Parametrize over ``values``: the first of them at every depth, others at long."""
    return mostly_full(values, mark=pytest.mark.long)
