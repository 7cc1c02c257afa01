"""pytest hooks of the test depth: selection, seeds, a summary of what was left out."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from depth import DEPTH, SEED, SEED_VARIABLE, VARIABLE, seed_of

TESTS = Path(__file__).parents[1]
LEFT_OUT = pytest.StashKey[Counter]()
"""Tests that the depth deselects or reduces."""
FILE = pytest.StashKey[Path]()
"""The file of the last test."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.stash[LEFT_OUT] = Counter()
    if DEPTH == "long" and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header():
    return f"test depth: {DEPTH} ({VARIABLE}); seed: {SEED} ({SEED_VARIABLE})"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed what draws without a generator: no test depends on those before it."""
    from inl.engine import options

    if item.config.stash.get(FILE, item.path) != item.path:
        settle()
    item.config.stash[FILE] = item.path
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:
        # Not torch.manual_seed, which also asks devices that tests may simulate.
        sys.modules["torch"].default_generator.manual_seed(SEED)
    draws = random.Random(seed_of(item.nodeid))
    options.random_seed = lambda: draws.getrandbits(63)


def pytest_collection_finish():
    settle()


def settle():
    """Leave out of later collections of garbage what is left: modules and tests.

    Collections would take half a second each, and a server in this process makes one
    when it ends.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        property_test = getattr(item.obj, "is_hypothesis_test", False)
        if property_test or "depth" in item.fixturenames:
            item.add_marker("scaled")
    if DEPTH != "long":
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    if DEPTH != "quick":
        return
    full = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if not item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    config.stash[LEFT_OUT].update(
        full=len(full), scaled=sum(bool(i.get_closest_marker("scaled")) for i in items)
    )


def pytest_sessionfinish(session):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist
        output["left out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every process of pytest-xdist collects all tests; keep one count."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] |= Counter(output.get("left out", {}))


def pytest_terminal_summary(terminalreporter, config):
    if DEPTH != "quick":
        return
    counts = config.stash[LEFT_OUT]
    terminalreporter.section("left out at quick depth")
    terminalreporter.line(
        f"{counts['full']} tests marked full; "
        f"{counts['scaled']} tests ran with fewer examples, seeds or steps"
    )
    if VARIABLE in os.environ and not config.option.keyword:
        for folder, files in folders_outside(config).items():
            terminalreporter.line(f"{folder}: {files} test files")
    terminalreporter.line("run everything: make test-all, and make test-long")


def folders_outside(config):
    """Count test files under tests/ that the arguments of this run do not cover."""
    given = [
        Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args
    ]
    counts = Counter()
    for file in TESTS.rglob("test_*.py"):
        if not any(file.is_relative_to(path.resolve()) for path in given):
            counts[str(Path("tests", *file.relative_to(TESTS).parts[:-1][:2]))] += 1
    return dict(sorted(counts.items()))
