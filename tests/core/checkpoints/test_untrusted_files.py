"""Files that are no files, links that leave the folder, and files that shrink."""

from __future__ import annotations

import json
import os

import pytest
from safetensors.numpy import save_file

from depth import mostly_full
from inl.checkpoints.checkpoint import open_checkpoint
from inl.errors import CheckpointError
from limited import run_limited

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the files are POSIX's")

OPEN = """
def work():
    from inl.checkpoints.checkpoint import open_checkpoint
    checkpoint = open_checkpoint(sys.argv[1])
    template = checkpoint.chat_template
    checkpoint.tokenizer()
    return template.source if template else ""
"""
INDEX = "model.safetensors.index.json"
FILES = [
    "model.safetensors",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    INDEX,
]
KINDS = ["FIFO", "device", "link"]
CASES = [
    (FILES[(at + turn) % len(FILES)], kind)
    for turn in range(len(FILES))
    for at, kind in enumerate(KINDS)
]
"""All files as all kinds, which begin with each kind once."""


@pytest.fixture
def folder(tmp_path, tensors):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": vocabulary}
    for name, value in {
        "config.json": {"vocab_size": 127},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"chat_template": "x"},
    }.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def replaced(folder, name, kind, outside):
    path = folder / name
    path.unlink(missing_ok=True)
    if name == INDEX:
        (folder / "model.safetensors").unlink()  # a whole file comes before an index
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        outside.write_text('{"secret": "content"}')
        path.symlink_to(outside)


@pytest.mark.parametrize("case", mostly_full(CASES, len(KINDS)), ids=" ".join)
def test_what_is_no_file_of_the_folder_is_refused(folder, tmp_path, case):
    name, kind = case
    replaced(folder, name, kind, tmp_path / "outside")
    found = run_limited(OPEN, folder, seconds=120)
    assert found.result == "refused", found
    assert f"{folder / name}: found a" in found.message
    what = "a FIFO" if kind == "FIFO" else "outside of the model's folder"
    assert what in found.message
    assert "secret" not in found.message


@pytest.mark.parametrize("kind", mostly_full(["FIFO", "device"]))
def test_a_gguf_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "m.gguf"
    replaced(tmp_path, "m.gguf", kind, tmp_path / "outside")
    for given in (path, tmp_path):
        found = run_limited(OPEN, given, seconds=120)
        assert found.result == "refused", found
        assert str(path) in found.message


def test_links_in_the_folder_and_to_blobs_of_the_hub_are_followed(folder, tmp_path):
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "chat_template.jinja").symlink_to("config.json")
    assert open_checkpoint(snapshot).chat_template.source == '{"vocab_size": 127}'
    assert open_checkpoint(snapshot).tokenizer().encode("aa") == [0, 0]
    (tmp_path / "by name").symlink_to(snapshot)
    assert "model.norm.weight" in open_checkpoint(tmp_path / "by name").names()


def test_a_link_from_a_snapshot_to_elsewhere_is_refused(folder, tmp_path):
    snapshot = tmp_path / "cache" / "snapshots" / "main"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (tmp_path / "cache" / "refs").write_text("x")
    (snapshot / "chat_template.jinja").symlink_to("../../refs")
    with pytest.raises(CheckpointError, match=r"jinja: found a link to .*/refs, outs"):
        _ = open_checkpoint(snapshot).chat_template


SHRINK = """
def work():
    import os
    import numpy as np
    from inl.checkpoints.checkpoint import open_checkpoint
    from inl.checkpoints.blocks.dtypes import dequantize
    checkpoint = open_checkpoint(sys.argv[1])
    file, size = sys.argv[2], int(sys.argv[3])
    os.truncate(file, size)
    if len(sys.argv) > 4:
        return checkpoint.tokenizer().decode([5, 100])
    return float(dequantize(checkpoint.tensor("model.embed_tokens.weight")).sum())
"""


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_shrinks_after_it_was_opened_is_an_error(folder, tiny_gguf, kind):
    path = tiny_gguf if kind == "gguf" else folder / "model.safetensors"
    found = run_limited(SHRINK, tiny_gguf if kind == "gguf" else folder, path, 4096)
    assert found.result == "refused", found
    assert str(path) in found.message
    assert "it was truncated after it was opened" in found.message


def test_a_vocabulary_outlives_its_file(tiny_gguf):
    found = run_limited(SHRINK, tiny_gguf, tiny_gguf, 0, "vocabulary")
    assert found.result == "read", found
