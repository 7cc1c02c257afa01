"""docs/engine-config.md equals the output of its generator."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from inl.config import EngineConfig
from inl.testing.config_page import config_fields, config_page

PAGE = Path(__file__).parents[3] / "docs" / "engine-config.md"


def test_the_page_is_current():
    assert PAGE.read_text() == config_page(), (
        "regenerate: python -m inl.testing.config_page > docs/engine-config.md"
    )


def test_every_field_is_found_with_its_default():
    found = {field.name: field.default for field in config_fields()}
    assert list(found) == [field.name for field in fields(EngineConfig)]
    defaults = EngineConfig()
    for name, default in found.items():
        assert eval(default) == getattr(defaults, name)


def test_every_field_has_a_docstring():
    for field in config_fields():
        assert field.doc.rstrip().endswith("."), field.name
