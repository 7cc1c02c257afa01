"""docs/ops.md equals the output of its generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from inl.ops import catalog
from inl.testing.ops_page import ops_page

PAGE = Path(__file__).parents[3] / "docs" / "ops.md"


def test_the_page_is_current():
    assert PAGE.read_text() == ops_page(), (
        "write it again: python -m inl.testing.ops_page > docs/ops.md"
    )


@pytest.mark.parametrize("name", sorted(catalog()))
def test_every_op_has_a_section_with_its_parameters(name):
    _, _, section = PAGE.read_text().partition(f"\n## {name}\n")
    section, _, _ = section.partition("\n## ")
    for parameter in catalog()[name].parameters:
        assert parameter in section
    kind = "composite" if catalog()[name].composite else "primitive"
    assert f"- kind: {kind}" in section
