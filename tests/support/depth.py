"""Test depth: the environment variable INL_TEST_DEPTH, ``quick`` (default), ``full`` or
``long``, which is ``full`` with more steps of the random tests.

``quick`` and ``full`` draw from a constant seed: a run repeats the one before. ``long``
draws from another seed each time, which is printed; INL_TEST_SEED repeats it.

Tests marked ``full`` run only at full depth. Tests marked ``scaled`` run at both, with
more examples, seeds or steps at full depth: property tests and those that take the
``depth`` fixture are marked automatically. A full run in an environment where the quick
run has passed needs only ``-m "full or scaled"``.
"""

from __future__ import annotations

import os
import secrets
from random import Random

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

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


SEED_VARIABLE = "INL_TEST_SEED"
SEED = int(
    os.environ.get(SEED_VARIABLE)
    or (secrets.randbelow(2**31) if DEPTH == "long" else 20261126)
)
"""Of every draw in the tests. Processes of pytest-xdist inherit it."""

os.environ[SEED_VARIABLE] = str(SEED)


# A deadline for each example would fail on a busy machine.
settings.register_profile(
    "inl", deadline=None, max_examples=scaled(30, 60), derandomize=DEPTH != "long"
)
settings.load_profile("inl")

if DEPTH != "long":
    # Hypothesis draws the constants of all imported modules of ours too: examples would
    # depend on which tests ran before in the same process.
    providers.is_local_module_file = lambda _file: False


def examples(quick, full, long=None, **options):
    """Decorate a property test: the number of examples by depth."""
    return settings(max_examples=scaled(quick, full, long), **options)


def mostly_full(values, quick=1, mark=pytest.mark.full):
    """Parametrize over ``values``: the first ``quick`` of them at every depth."""
    return [
        value if at < quick else pytest.param(value, marks=mark)
        for at, value in enumerate(values)
    ]


def mostly_long(values, kept=1):
    """Parametrize over ``values``: the first ``kept`` at every depth, all at long."""
    return [value if at < kept else only_long(value) for at, value in enumerate(values)]


def seed_of(name):
    """32 bits for the draws of a test, or whatever else has this name."""
    return Random(f"{SEED} {name}").getrandbits(32)


def drawn(values):
    """Return one of ``values``: the same in every run but those at long depth."""
    values = list(values)
    return Random(f"{SEED} {values}").choice(values)


def mostly_drawn(values):
    """Parametrize over ``values``: one drawn by the seed, and all of them at long."""
    one = drawn(values)
    return [value if value == one else only_long(value) for value in values]


def only_long(value):
    """A parameter, or a tuple of them, at long depth."""
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.long)
