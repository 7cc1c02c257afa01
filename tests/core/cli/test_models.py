"""``inl models``."""

from __future__ import annotations

import json
import os

import pytest

from inl.checkpoints.hub.resolve import DEFAULT, DEFAULT_NAME
from inl.plugin import registry


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


def test_the_plugin_is_that_of_the_model_that_runs(inl, tiny_folder, tmp_path):
    """The type of a model decides, and of what is around it that of its text."""
    derived = copy(tiny_folder, tmp_path / "derived", architectures=["AcmeForCausalLM"])
    facts = json.loads(inl("models", str(derived), "--json").stdout)
    assert (facts["plugin"], facts["problem"]) == ("builtin", None)
    shown = inl("models", str(derived)).stdout
    assert "AcmeForCausalLM (builtin)\n" in shown
    config = json.loads((tiny_folder / "config.json").read_text())
    names = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    around = copy(tiny_folder, tmp_path / "around", **names, text_config=config)
    facts = json.loads(inl("models", str(around), "--json").stdout)
    assert (facts["plugin"], facts["problem"]) == ("builtin", None)


def test_a_path_without_a_model_is_an_error(inl, tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    done = inl("models", str(tmp_path / "text.gguf"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("inl: CheckpointError: ")


@pytest.fixture
def packed(cache, tmp_path):
    """Two files of packed weights, an abandoned one, and one in progress."""
    folder = tmp_path / "cache" / "packed"
    folder.mkdir(0o700)
    for name, size in (("a.tiles", 4096), ("b.tiles", 1024), ("c.1-0.part", 512)):
        (folder / name).write_bytes(bytes(size))
    os.utime(folder / "c.1-0.part", (1000, 1000))
    (folder / "d.1-0.part").write_bytes(b"in progress")
    (folder / "key").write_bytes(bytes(32))
    return folder


def test_the_list_counts_packed_weights(inl, cache, packed):
    lines = [line.split() for line in inl("models", env=cache).stdout.splitlines()]
    assert ["packed", "weights", "cached", "5.0", "KiB", str(packed)] in lines
    found = json.loads(inl("models", "--json", env=cache).stdout)["packed"]
    assert found == {"place": str(packed), "files": 2, "bytes": 5120}


def test_prune_removes_packed_weights_only(inl, cache, packed):
    outside = packed.parent / "other.gguf"
    (packed / "link.tiles").symlink_to(outside)
    done = inl("models", "--prune", env=cache)
    assert (done.returncode, done.stderr) == (0, "")
    *removed, total = done.stdout.splitlines()
    assert f"removed {packed / 'a.tiles'}  4.0 KiB" in removed
    assert len(removed) == 4
    assert total.startswith("4 files, 5.")
    assert total.endswith(" KiB freed")
    assert {file.name for file in packed.iterdir()} == {"d.1-0.part", "key"}
    assert outside.stat().st_size == 2048
    again = json.loads(inl("models", "--prune", "--json", env=cache).stdout)
    assert again == {"place": str(packed), "removed": [], "bytes": 0}


def test_prune_without_a_cache_removes_nothing(inl, tmp_path):
    done = inl("models", "--prune", env={"INL_CACHE": str(tmp_path / "none")})
    assert done.stdout == "0 files, 0 bytes freed\n"
    assert not (tmp_path / "none").exists()


def test_prune_refuses_a_linked_folder(inl, cache, tmp_path):
    """It may hold files of someone else."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.tiles").write_bytes(b"mine")
    (tmp_path / "cache" / "packed").symlink_to(other)
    done = inl("models", "--prune", env=cache)
    assert done.returncode != 0
    assert "packed: is a symbolic link" in done.stderr
    assert (other / "a.tiles").exists()


def test_prune_takes_no_model(inl, cache):
    done = inl("models", "other.gguf", "--prune", env=cache)
    assert done.returncode != 0
    assert "--prune takes no MODEL" in done.stderr
