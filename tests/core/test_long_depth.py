"""What only long depth runs is in a target of the Makefile."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKS = re.compile(r"mark\.long\b|\b(mostly_long|only_long|mostly_drawn)\(")
VALUES = re.compile(r"\b(scaled|depth|examples)\(")
STARTED = re.compile(r"from triton_place import")
"""In test files that :data:`STARTER` starts."""
STARTER = "tests/torch/triton/test_interpreted.py"


def listed():
    """Files and folders that the Makefile runs at long depth."""
    text = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "INL_TEST_DEPTH=long" in line]
    return [
        word for line in lines for word in line.split() if word.startswith("tests/")
    ]


def has_more(source):
    """Whether a file has tests, values or examples of long depth only."""
    if MARKS.search(source):
        return True
    if not VALUES.search(source):
        return False
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(
        VALUES.match(f"{getattr(call.func, 'id', '')}(") and len(call.args) == 3
        for call in calls
    )


@cache
def files_with_more():
    """Test files, by the name of that which starts them."""
    names = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text("utf-8")
        if has_more(source):
            started = STARTED.search(source)
            names.append(STARTER if started else path.relative_to(ROOT).as_posix())
    return names


def missing(targets):
    return [
        name
        for name in files_with_more()
        if not any(name == each or name.startswith(f"{each}/") for each in targets)
    ]


def test_a_target_runs_what_long_depth_adds():
    assert missing(listed()) == []


GONE = (
    "tests/serve",
    "tests/core/engine/test_soak.py",
    "tests/torch/triton/test_compile.py",
    "tests/core/kv_tiers/test_tier_soak.py",
)


@pytest.mark.parametrize("gone", GONE)
def test_a_file_that_no_target_runs_is_found(gone):
    found = missing([each for each in listed() if each != gone])
    assert found
    assert all(name.startswith(gone) for name in found)
