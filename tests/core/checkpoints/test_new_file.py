"""Files and folders appear whole or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inl.checkpoints.files import new_file as module
from inl.checkpoints.files.new_file import (
    check_space,
    check_target,
    new_file,
    new_folder,
)
from inl.errors import CheckpointError


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path):
    target = tmp_path / "a.gguf"
    target.write_bytes(b"before")
    with new_file(target) as file:
        file.write(b"after")
        assert target.read_bytes() == b"before"
    assert target.read_bytes() == b"after"
    assert names(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(tmp_path, error):
    target, folder = tmp_path / "a.gguf", tmp_path / "b"
    target.write_bytes(b"before")
    folder.mkdir()
    (folder / "old").touch()

    def write_file():
        with new_file(target) as file:
            file.write(b"after")
            raise error

    def write_folder():
        with new_folder(folder) as part:
            (part / "new").touch()
            raise error

    for write in (write_file, write_folder):
        with pytest.raises(error):
            write()
    assert target.read_bytes() == b"before"
    assert names(tmp_path) == ["a.gguf", "b"]
    assert names(folder) == ["old"]


def test_a_folder_replaces_another(tmp_path):
    for name in ("first", "second"):
        with new_folder(tmp_path / "b") as part:
            (part / name).touch()
    assert names(tmp_path) == ["b"]
    assert names(tmp_path / "b") == ["second"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from inl.checkpoints.files.new_file import new_file
from inl.errors import CheckpointError

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    with new_file(Path(sys.argv[1])) as file:
        for _ in range(64):
            file.write(b"x" * 4096)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are of POSIX")
def test_a_file_that_cannot_grow_is_an_error_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "a.gguf: cannot be written: File too large, with" in done.stdout, done.stderr
    assert names(tmp_path) == []


def test_a_disk_without_space_is_named_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "free_bytes", lambda _: 99)
    check_space(tmp_path / "a", 99)
    with pytest.raises(CheckpointError, match="needs 100 bytes, and its disk has 99"):
        check_space(tmp_path / "a", 100)


def test_the_input_is_never_replaced(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    source = folder / "m.gguf"
    source.touch()
    (tmp_path / "link.gguf").symlink_to(source)
    for target in (source, folder, tmp_path, tmp_path / "link.gguf"):
        with pytest.raises(CheckpointError, match="found the input"):
            check_target(target, source, force=True)
    check_target(folder / "other.gguf", source, force=False)


def test_only_the_folder_of_a_model_is_replaced(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.touch()
    target.mkdir()
    check_target(target, source, force=True)
    (target / "letters.txt").touch()
    with pytest.raises(CheckpointError, match=r"found a folder without config\.json"):
        check_target(target, source, force=True)
    (target / "config.json").touch()
    check_target(target, source, force=True)
    with pytest.raises(CheckpointError, match="found a folder; accepted: the path of"):
        new_file(target).__enter__()
    assert names(target) == ["config.json", "letters.txt"]


def test_an_existing_target_needs_force_and_a_folder(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.touch()
    target.touch()
    with pytest.raises(CheckpointError, match=r"exists already; accepted: .* --force"):
        check_target(target, source, force=False)
    check_target(target, source, force=True)
    with pytest.raises(CheckpointError, match="found no folder"):
        check_target(tmp_path / "no" / "b", source, force=True)
