"""Short names, names behind hosts, and models in the caches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inl.checkpoints.hub.hugging_face import HubName
from inl.checkpoints.hub.resolve import find_model
from inl.checkpoints.hub.short_names import REPOSITORIES, short_names
from inl.errors import CheckpointError

ONE_B = "bartowski/Llama-3.2-1B-Instruct-GGUF"
THREE_B = "bartowski/Llama-3.2-3B-Instruct-GGUF"


@pytest.mark.parametrize(
    ("text", "repo", "file"),
    [
        ("llama3.2:1b", ONE_B, "Q4_K_M"),
        ("Llama3.2", THREE_B, "Q4_K_M"),
        ("llama3.2:latest", THREE_B, "Q4_K_M"),
        ("hf.co/org/name:Q8_0", "org/name", "Q8_0"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("hf.co/org/name:latest", "org/name", None),
        ("org/name:Q8_0", "org/name", "Q8_0"),
    ],
)
def test_names_that_ollama_accepts(text, repo, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_model(text) == HubName(repo, None, file)


def test_a_path_comes_before_a_short_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3.2").mkdir()
    assert find_model("llama3.2") == Path("llama3.2")


@pytest.mark.parametrize("text", ["llama3.2:9b", "llama9:1b"])
def test_an_unknown_tag_names_near_ones(text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"short name such as llama3\.[12]:"):
        find_model(text)


def test_the_page_has_the_table():
    page = Path(__file__, "../../../../docs/checkpoints.md").resolve().read_text()
    found = re.findall(r"^\| `([\w.-]+)` \| (`.*`) \|$", page, re.M)
    table = {name: re.findall("`([^`]+)`", tags) for name, tags in found}
    listed = {name: tags for name, tags in table.items() if name in REPOSITORIES}
    assert listed == {name: list(tags) for name, tags in REPOSITORIES.items()}
    assert len(short_names()) == sum(map(len, REPOSITORIES.values()))
