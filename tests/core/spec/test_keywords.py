"""Values of the contract are constructed by keyword, so that they may get fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from inl.backend.base import Rank
from inl.spec.cache import State
from inl.spec.limits import Limits
from inl.spec.program import ProgramInfo
from inl.spec.step import Bucket, Scores, Step, Tables

ROOT = Path(__file__).parents[3]
VALUES = {
    each.__name__
    for each in (Bucket, Limits, ProgramInfo, Rank, Scores, State, Step, Tables)
}
SOURCES = [
    *ROOT.glob("core/src/**/*.py"),
    *ROOT.glob("core/src/inl/testing/scaffold_data/*.txt"),
    *ROOT.glob("libs/*/src/**/*.py"),
    *ROOT.glob("plugins/*/src/**/*.py"),
    *ROOT.glob("examples/**/*.py"),
]


def positional(source):
    """Lines that construct a value by position, but from all fields of another one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in VALUES
        and node.args
        and not (len(node.args) == 1 and isinstance(node.args[0], ast.Starred))
    ]


def imports_values(source):
    """Whether the names are those of the contract: the server has others."""
    return re.search(r"from inl\.(spec|backend\.base)\b|inl\.backend", source)


def test_values_are_constructed_by_keyword():
    found = {}
    for path in SOURCES:
        source = path.read_text("utf-8").replace("$name", "name")
        if imports_values(source) and (lines := positional(source)):
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}


def test_values_of_the_pages_are_constructed_by_keyword():
    for name in ("hooks", "writing-a-backend"):
        page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            assert positional(block) == [], block


@pytest.mark.parametrize(
    "source", ["Bucket(1, 2)", "Step(*ids, rows)", "State((), {})"]
)
def test_this_check_can_fail(source):
    assert positional(source) == [1]
