"""``inl models``."""

from __future__ import annotations

import json

import pytest

from inl.plugin import registry
from inl.weights.hub import DEFAULT, DEFAULT_NAME


@pytest.fixture
def cache(tmp_path):
    """A cache folder with two files, and no Hugging Face cache beside it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "other.gguf").write_bytes(b"x" * 2048)
    (folder / "notes.txt").write_text("no model")
    return {"INL_CACHE": str(folder), "HF_HOME": str(tmp_path / "hf")}


def test_the_list_names_the_default_and_what_is_cached(inl, cache):
    done = inl("models", env=cache)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, blank, *architectures = done.stdout.splitlines()
    assert first.split()[:3] == [DEFAULT_NAME, "not", "fetched"]
    assert second.split()[:4] == ["other.gguf", "cached", "2.0", "KiB"]
    assert blank == ""
    assert {line.split()[0] for line in architectures} == set(registry().models())


def test_the_list_as_json(inl, cache, tmp_path):
    file = tmp_path / "cache" / DEFAULT.member.rpartition("/")[2]
    file.write_bytes(b"y" * 7)
    found = json.loads(inl("models", "--json", env=cache).stdout)
    assert found["cache"] == cache["INL_CACHE"]
    assert found["models"][0] == {
        "name": DEFAULT_NAME,
        "state": "cached",
        "bytes": 7,
        "place": str(file),
    }
    assert [row["name"] for row in found["models"]] == [DEFAULT_NAME, "other.gguf"]


def test_a_missing_cache_folder_is_no_error(inl, tmp_path):
    env = {"INL_CACHE": str(tmp_path / "none"), "HF_HOME": str(tmp_path / "hf")}
    found = json.loads(inl("models", "--json", env=env).stdout)
    assert [row["state"] for row in found["models"]] == ["not fetched"]


def test_a_models_files_are_counted(inl, tiny_folder):
    facts = json.loads(inl("models", str(tiny_folder), "--json").stdout)
    config = json.loads((tiny_folder / "config.json").read_text())
    hidden, inner, vocab = 48, config["intermediate_size"], config["vocab_size"]
    layer = hidden * (64 + 16 + 16 + 64) + 3 * hidden * inner + 2 * hidden
    parameters = 2 * vocab * hidden + hidden + 2 * layer
    assert (facts["parameters"], facts["bytes"]) == (parameters, 4 * parameters)
    assert list(facts["tensors"]) == ["float32"]
    assert (facts["context"], facts["chat_template"]) == (8192, True)
    assert (facts["tokenizer"], facts["problem"]) == ("258 tokens", None)
    shown = inl("models", str(tiny_folder)).stdout
    assert f"parameters           {parameters:,}\n" in shown
    assert shown.endswith("runs here            yes\n")


def copy(folder, target, **changes):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_model_that_cannot_run_is_shown_with_the_reason(inl, tiny_folder, tmp_path):
    names = {"architectures": ["AcmeForCausalLM"], "model_type": "acme"}
    acme = copy(tiny_folder, tmp_path / "acme", **names)
    done = inl("models", str(acme))
    assert (done.returncode, done.stderr) == (0, "")
    assert "AcmeForCausalLM (not registered by any plugin)" in done.stdout
    assert "runs here            no: " in done.stdout
    wide = copy(tiny_folder, tmp_path / "wide", intermediate_size=97)
    facts = json.loads(inl("models", str(wide), "--json").stdout)
    assert "expected [97, 48]" in facts["problem"]


def test_a_path_without_a_model_is_an_error(inl, tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    done = inl("models", str(tmp_path / "text.gguf"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("inl: CheckpointError: ")
