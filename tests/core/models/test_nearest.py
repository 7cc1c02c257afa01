"""An unknown family is refused by the nearest supported one and what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from inl.errors import UnknownArchitecture
from inl.models.nearest import DIFFERENCES
from inl.models.registry import find_model
from inl.plugin import registry


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_families_that_are_asked_for_say_what_is_lacking(kind):
    near, lacking = DIFFERENCES[kind]
    assert near in registry().models()
    assert kind not in registry().models(), "it is supported now: remove the row"
    with pytest.raises(UnknownArchitecture) as caught:
        find_model({"model_type": kind, "architectures": ["Unknown"]}, Path("m"))
    sentence = f"; nearest: {near}, which lacks {lacking}; registered: "
    assert sentence in str(caught.value)
    with pytest.raises(UnknownArchitecture, match=f"; nearest: {near}, which lacks"):
        find_model({"model_type": f"{kind}_text"}, Path("m"))


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ({"model_type": "qwen3_nexts"}, "qwen3_next"),
        ({"architectures": ["LlamaForCausalLMs"]}, "LlamaForCausalLM"),
    ],
)
def test_other_families_have_the_nearest_name(config, near):
    with pytest.raises(UnknownArchitecture, match=f"; nearest by name: {near}; reg"):
        find_model(config, Path("m"))


def test_nothing_is_near_a_strange_name():
    with pytest.raises(UnknownArchitecture, match="found 'zzzzzzzz'; registered: "):
        find_model({"model_type": "zzzzzzzz"}, Path("m"))
