"""The walk through the files of ARCHITECTURE.md, compared with a traced run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import entered_files
import inl
import inl_cpu

ROOT = Path(__file__).parents[3]
INL, CPU = Path(inl.__file__).parent, Path(inl_cpu.__file__).parent
PROMPT = "Tell me a long story."
TOKENS = 16
FIRST = 3
"""Steps at the beginning, which also admit, compute a prompt or record a program."""
FUNCTIONS = 3
"""A file with fewer functions in a decoding step only looks up values for others."""


def table():
    """Return the rows of the table of the walk, as text."""
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    walk = page.partition("\n## The life of a token\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \|.*$", walk, re.M)


def files(rows):
    """List the Python files of a table: paths below ``inl``, or of ``inl_cpu``."""
    names = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
    return [
        CPU.parent / name if name.startswith("inl_") else INL / name for name in names
    ]


def short(path):
    return str(path.relative_to(CPU.parent if CPU in path.parents else INL.parent))


class Trace(NamedTuple):
    """A traced run."""

    entered: list[Path]
    """Files in the order of their first calls."""
    called: dict[Path, set[str]]
    """Functions of each file that every decoding step calls."""


def trace_of(calls):
    """Return the :class:`Trace` of calls: (file, function)."""
    begins = [i for i, (_, name) in enumerate(calls) if name == "EngineCore.step"]
    assert len(begins) > TOKENS // 2 + FIRST
    steps = [
        {tuple(call) for call in calls[begin:end]} for begin, end in pairwise(begins)
    ]
    called = defaultdict(set)
    for path, name in set.intersection(*steps[FIRST:]):
        called[Path(path)].add(name)
    return Trace([*map(Path, dict.fromkeys(path for path, _ in calls))], dict(called))


def differences(walk, trace):
    """List what is wrong with a walk: files not entered, out of order, or missing."""
    entered = trace.entered
    absent = [f"{short(path)} is not entered" for path in walk if path not in entered]
    listed = [path for path in walk if path in entered]
    order = [
        f"{short(second)} is entered before {short(first)}"
        for first, second in pairwise(listed)
        if entered.index(second) < entered.index(first)
    ]
    rooms = {path.parent for path in walk}
    missing = [
        f"{short(path)} is missing: each step calls {', '.join(sorted(names))}"
        for path, names in trace.called.items()
        if len(names) >= FUNCTIONS and path.parent in rooms and path not in walk
    ]
    return absent + order + missing


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """``inl generate`` on the native backend."""
    output = tmp_path_factory.mktemp("calls") / "calls.json"
    options = f"--device cpu --max-tokens {TOKENS}".split()
    done = subprocess.run(
        [sys.executable, entered_files.__file__, output, "generate", PROMPT, *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return trace_of(json.loads(output.read_text()))


def test_the_walk_is_what_a_token_takes(trace):
    walk = files(table())
    assert len(walk) > 25
    assert len(set(walk)) == len(walk)
    assert differences(walk, trace) == []


def test_files_in_another_order_are_found(trace):
    walk = files(table())
    for i in range(len(walk) - 1):
        swapped = [*walk[:i], walk[i + 1], walk[i], *walk[i + 2 :]]
        found = differences(swapped, trace)
        assert found == [f"{short(walk[i])} is entered before {short(walk[i + 1])}"]


def test_a_file_that_is_left_out_is_found(trace):
    walk = files(table())
    taking_part = [
        path for path in walk if len(trace.called.get(path, ())) >= FUNCTIONS
    ]
    assert len(taking_part) > 10
    for path in taking_part:
        others = [each for each in walk if each != path]
        if path.parent in {each.parent for each in others}:
            (found,) = differences(others, trace)
            assert found.startswith(f"{short(path)} is missing")


def test_a_file_that_is_not_entered_is_found(trace):
    walk = [*files(table()), INL / "__main__.py"]
    assert differences(walk, trace) == ["inl/__main__.py is not entered"]
