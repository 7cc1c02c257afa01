"""The table of architectures is that of the registry, and of what tests compare."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from inl.errors import PluginError
from inl.plugin.builtin import FAMILIES
from inl.testing import checkpoints_page
from inl.testing.checkpoints_page import read_rows

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "checkpoints.md"
SUPPORT = ROOT / "tests" / "support"
KINDS = {name: kind for name, kind, _ in FAMILIES}


def test_the_page_is_current():
    page = PAGE.read_text("utf-8")
    assert checkpoints_page.checkpoints_page(page) == page, (
        "write it again: python -m inl.testing.checkpoints_page docs/checkpoints.md"
    )


def test_a_family_without_a_row_is_named(monkeypatch):
    new = ("NewForCausalLM", "new", "llama")
    monkeypatch.setattr(checkpoints_page, "FAMILIES", (*FAMILIES, new))
    with pytest.raises(PluginError, match=r"found no NewForCausalLM; add rows"):
        checkpoints_page.family_table()


def table_of(file, name):
    """The dict that a module of tests assigns to a name, whose imports need torch."""
    for node in ast.parse((SUPPORT / file).read_text()).body:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if getattr(target, "id", "") == name:
                return node.value
    raise AssertionError(f"{file} has no {name}")


def test_what_is_compared_is_what_tests_compare():
    """Tiny models by class, drawn configs by model_type, and encoders of images."""
    classes = {
        each.elts[0].value for each in table_of("families.py", "FAMILIES").values
    }
    drawn = {each.value for each in table_of("config_draws.py", "FAMILIES").keys}
    images = (SUPPORT / "image_models.py").read_text() + (
        ROOT / "tests" / "integration" / "test_image_families.py"
    ).read_text()
    towers = {
        each.elts[0].value
        for each in table_of("../integration/test_text_towers.py", "TOWERS").values
    }
    for row in read_rows():
        name = row["names"][0]
        causal = re.fullmatch(r"(\w+?)(ForCausalLM|LMHeadModel)", name)
        expected = []
        if causal and causal[1] in classes:
            expected.append("logits")
        if causal and KINDS[name] in drawn:
            expected.append("configs")
        if any(f"transformers.{each}(" in images for each in row["names"]):
            expected.append("images")
        if towers.issuperset(row["names"]):
            expected.append("text")
        assert row["compared"] == (expected or ["family"]), name
