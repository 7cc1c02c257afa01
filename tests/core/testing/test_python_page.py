"""docs/python-api.md equals the output of its generator, and is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from inl.engine.inference_engine import InferenceEngine
from inl.testing.python_page import CLASSES, public_members, python_page

PAGE = Path(__file__).parents[3] / "docs" / "python-api.md"


def test_the_page_is_current():
    assert PAGE.read_text("utf-8") == python_page(), (
        "regenerate: python -m inl.testing.python_page > docs/python-api.md"
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_member_has_a_docstring_and_a_heading(cls):
    page = PAGE.read_text("utf-8").splitlines()
    for name, member in public_members(cls):
        assert member.__doc__, name
        assert f"### {cls.__name__}.{name}" in page


def test_the_engine_has_what_the_tutorial_uses():
    names = {name for name, _ in public_members(InferenceEngine)}
    assert {"generate", "stream", "chat", "embed", "submit", "agenerate"} <= names
