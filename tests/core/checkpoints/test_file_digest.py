"""Digests of file contents, and their record in a private folder."""

from __future__ import annotations

import hashlib
import os
import time
from random import Random

import pytest
from safetensors.numpy import save_file

from inl.backend.weight_cache import FileIdentity
from inl.cache_dir import file_digest
from inl.cache_dir.file_digest import ChangedFile, RememberedDigests, content_digest
from inl.cache_dir.private_folder import PrivateFolder, Untrusted
from inl.checkpoints.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path):
    with PrivateFolder(tmp_path / "private", create=True) as opened:
        yield opened


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model"
    file.write_bytes(bytes(range(256)) * 100)
    return file


def digest_of(file, size=None):
    with file.open("rb") as opened:
        return content_digest(opened.fileno(), size or file.stat().st_size)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3500])
def test_the_digest_is_that_of_the_pieces(tmp_path, monkeypatch, size):
    monkeypatch.setattr(file_digest, "PIECE", 1000)
    monkeypatch.setattr(file_digest, "READ", 300)
    data = Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    pieces = [data[at : at + 1000] for at in range(0, size, 1000)]
    joined = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    expected = hashlib.sha256(joined + size.to_bytes(8, "little")).hexdigest()
    assert digest_of(tmp_path / "file") == expected


def test_a_file_that_shrinks_is_noticed(model):
    with pytest.raises(ChangedFile, match="found 25600 bytes instead of 25601"):
        digest_of(model, 25601)


def counted(monkeypatch):
    calls = []
    real = content_digest
    monkeypatch.setattr(
        file_digest, "content_digest", lambda *args: calls.append(args) or real(*args)
    )
    return calls


def test_a_digest_is_remembered_until_the_file_changes(folder, model, monkeypatch):
    calls = counted(monkeypatch)
    monkeypatch.setattr(file_digest, "TICK_NS", -(10**15))
    first = RememberedDigests(folder).digest(model)
    assert RememberedDigests(folder).digest(model) == first
    assert len(calls) == 1
    facts = model.stat()
    time.sleep(0.02)
    model.write_bytes(b"?" * facts.st_size)
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert RememberedDigests(folder).digest(model) != first
    assert len(calls) == 2


def test_a_file_that_changed_just_now_is_hashed_again(folder, model, monkeypatch):
    """It may change once more without another timestamp."""
    calls = counted(monkeypatch)
    for _ in range(2):
        RememberedDigests(folder).digest(model)
    assert len(calls) == 2


def test_records_are_limited(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(file_digest, "TICK_NS", -(10**15))
    monkeypatch.setattr(file_digest, "MAX_FILES", 3)
    digests = RememberedDigests(folder)
    files = [tmp_path / str(number) for number in range(5)]
    for file in files:
        file.write_text(file.name)
        digests.digest(file)
    calls = counted(monkeypatch)
    again = RememberedDigests(folder)
    for file in files[::-1]:
        again.digest(file)
    assert len(calls) == 2


def test_a_replaced_file_is_refused(folder, model, tmp_path):
    opened = FileIdentity.of(model.stat())
    (tmp_path / "new").write_bytes(model.read_bytes())
    (tmp_path / "new").replace(model)
    with pytest.raises(ChangedFile, match="model: changed after it was opened"):
        RememberedDigests(folder).digest(model, opened)


def test_a_full_disk_is_no_error(folder, model, monkeypatch):
    monkeypatch.setattr(file_digest, "TICK_NS", -(10**15))
    digests = RememberedDigests(folder)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write", full)
    assert digests.digest(model) == digest_of(model)


def test_the_key_is_made_once_and_replaced_if_damaged(folder):
    key = folder.key()
    assert folder.key() == key
    assert len(key) == 32
    for damage in (b"", b"short", b"x" * 33):
        (folder.path / "key").write_bytes(damage)
        assert folder.key() == folder.key() != key


def test_an_existing_file_is_kept(folder):
    folder.write("a", [b"1", b"2"])
    assert folder.read("a", 2) == b"12"
    with pytest.raises(FileExistsError):
        folder.write("a", [b"3"], replace=False)
    assert folder.names() == ["a"]
    with pytest.raises(Untrusted, match="found 2 bytes, accepted: at most 1"):
        folder.read("a", 1)


def test_a_link_is_replaced_and_not_followed(folder, model):
    (folder.path / "a").symlink_to(model)
    with pytest.raises(Untrusted, match="is a symbolic link"):
        folder.open("a")
    folder.write("a", [b"new"])
    assert folder.read("a", 9) == b"new"
    assert model.stat().st_size == 25600


def test_a_failed_write_leaves_nothing(folder):
    def pieces():
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.write("a", pieces())
    assert folder.names() == []


@pytest.mark.parametrize("layout", ["gguf", "folder"])
def test_checkpoints_know_the_files_that_they_mapped(layout, tensors, tiny_gguf):
    """Of the time when they were opened, whatever the path names later."""
    file = tiny_gguf
    if layout == "folder":
        (file.parent / "config.json").write_text('{"model_type": "llama"}')
        file = file.parent / "model.safetensors"
        save_file(tensors, file)
    checkpoint = open_checkpoint(file.parent)
    opened = FileIdentity.of(file.stat())
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)
    assert checkpoint.identities() == {file: opened}
    assert FileIdentity.of(file.stat()) != opened
    checkpoint.close()
