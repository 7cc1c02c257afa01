"""Runs at quick and full depth repeat: no test draws what the seed does not decide."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from depth import DEPTH

TESTS = Path(__file__).parents[1]

UNSEEDED = {
    "default_rng", "Random", "RandomState", "SeedSequence", "PCG64", "seed",
    "manual_seed",
}  # fmt: skip
"""Calls that draw a seed where they get none."""

SYSTEM = {"urandom", "getrandom", "SystemRandom", "uuid1", "uuid4"}
"""Calls that draw from the system or the clock, beside those of ``secrets``."""

CLOCKS = {"time", "time_ns", "monotonic", "perf_counter", "getpid", "id", "hash"}

ALLOWED = {"support/depth.py": {"randbelow", "settings"}}
"""The seed itself."""


def name_of(call):
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def owner_of(call):
    return getattr(getattr(call.func, "value", None), "id", "")


def draws(tree):
    """Yield line and name of the calls that draw another value in every run."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name, given = name_of(call), [*call.args, *(k.value for k in call.keywords)]
        seeds = name in UNSEEDED
        if seeds and all(
            isinstance(g, ast.Constant) and g.value is None for g in given
        ):
            yield call.lineno, name
        inner = [n for g in given for n in ast.walk(g) if isinstance(n, ast.Call)]
        if seeds and any(name_of(each) in CLOCKS for each in inner):
            yield call.lineno, name
        if name in SYSTEM or owner_of(call) == "secrets":
            yield call.lineno, name
        if name == "settings" and {"derandomize", "deadline", "database"} & {
            each.arg for each in call.keywords
        }:
            yield call.lineno, name


def test_no_test_draws_without_a_seed():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        short = path.relative_to(TESTS).as_posix()
        for line, name in draws(ast.parse(path.read_text("utf-8"))):
            if name not in ALLOWED.get(short, ()):
                found.append(f"{short}:{line}: {name}")
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "np.random.default_rng()", "default_rng(None)", "Random()", "random.seed()",
        "default_rng(seed=None)", "Random(time.time_ns())", "Random(hash('a'))",
        "os.urandom(4)", "secrets.token_hex(2)", "settings(derandomize=False)",
        "uuid.uuid4()",
    ],
)  # fmt: skip
def test_the_check_finds_draws(text):
    assert list(draws(ast.parse(text)))


PLAIN = r"""
import random

import numpy as np
from hypothesis import given, strategies as st

from depth import drawn, seed_of

VALUES = drawn(range(10_000))
print("collected", VALUES, seed_of("name"))

def test_a(capsys):
    from inl.engine.options import random_seed
    with capsys.disabled():
        print("\ndrawn", random.random(), np.random.rand(), random_seed())

@given(st.integers(), st.text())
def test_b(number, text):
    print("\nexample", number, ascii(text))
"""


@pytest.fixture
def outcome(tmp_path):
    """The draws of a run, by the environment variables of depth and seed."""
    file = tmp_path / "test_plain.py"
    file.write_text(PLAIN)
    words = ["-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "depth_hooks"]
    paths = [str(TESTS / "support"), *filter(None, sys.path)]

    def run(hashes, depth, **variables):
        dropped = {"INL_TEST_SEED", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"}
        env = {name: v for name, v in os.environ.items() if name not in dropped}
        env |= {"PYTHONHASHSEED": hashes, "INL_TEST_DEPTH": depth, **variables}
        env |= {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, *words, f"--rootdir={tmp_path}", str(file)],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        kinds = ("collected", "drawn", "example", "test depth")
        return [line for line in done.stdout.splitlines() if line.startswith(kinds)]

    return run


def test_two_runs_draw_alike(outcome):
    first = outcome("1", "quick")
    assert outcome("2", "quick") == first
    assert len(first) > 30
    assert any("; seed: " in line for line in first)


def test_runs_at_long_depth_differ_and_can_be_repeated(outcome):
    first = outcome("1", "long")
    (header,) = [line for line in first if line.startswith("test depth")]
    assert outcome("2", "long", INL_TEST_SEED=header.split()[-2]) == first
    other = outcome("1", "long")
    for kind in ("collected", "drawn", "example"):
        found, others = (
            [x for x in run if x.startswith(kind)] for run in (first, other)
        )
        assert found != others, kind


def test_examples_do_not_depend_on_imported_modules():
    from hypothesis.internal.conjecture import providers

    constants = providers._get_local_constants()
    assert DEPTH == "long" or len(constants) == 0
