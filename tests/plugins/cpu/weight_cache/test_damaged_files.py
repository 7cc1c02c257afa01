"""Cache files that are damaged, of other users, or planted."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from inl.cache_dir import file_digest
from inl_cpu import weight_cache_file
from inl_cpu.weight_cache_file import Damaged
from packed_weights import (
    changed_contents,
    check,
    packed,
    q4_0,
    start,
)


def damages():
    def cut(count):
        def damage(file):
            os.truncate(file, max(file.stat().st_size - count, 0))

        return damage

    def flip(at):
        def damage(file):
            data = bytearray(file.read_bytes())
            data[at] ^= 16
            file.unlink()
            file.write_bytes(data)

        return damage

    return {
        "empty": lambda file: os.truncate(file, 0),
        "a byte short": cut(1),
        "half a trailer": cut(20),
        "no trailer": cut(48),
        "half": lambda file: os.truncate(file, file.stat().st_size // 2),
        "first byte": flip(0),
        "a code": flip(5000),
        "two words exchanged": exchange_words,
        "the description": flip(-200),
        "the signature": flip(-20),
        "another version": lambda file: rewrite(file, -8, b"INLTILE1"),
        "a wild length": lambda file: rewrite(file, -48, b"\xff" * 8),
        "a negative length": lambda file: rewrite(file, -41, b"\x80"),
        "something else": lambda file: file.write_text("no weights at all " * 99),
        "an empty folder": lambda file: (file.unlink(), file.mkdir()),
        "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
        "a device": lambda file: replaced_by_link(file, Path("/dev/zero")),
        "a link to itself": lambda file: replaced_by_link(file, file),
        "a link to a copy": link_to_copy,
        "others may write": lambda file: file.chmod(0o666),
        "a group may write": lambda file: file.chmod(0o620),
        "another key": lambda file: (file.parent / "key").write_bytes(bytes(32)),
        "a short key": lambda file: (file.parent / "key").write_bytes(b"k"),
    }


def rewrite(file, at, data):
    with file.open("r+b") as opened:
        opened.seek(at, os.SEEK_END)
        opened.write(data)


def exchange_words(file):
    """Sums of the words stay equal."""
    words = np.memmap(file, np.uint64, "r+", shape=(512,))
    place = int(np.flatnonzero(words != words[0])[0])
    words[[0, place]] = words[[place, 0]]
    words.flush()


def replaced_by_link(file, target):
    file.unlink()
    file.symlink_to(target)


def link_to_copy(file):
    copy = file.with_suffix(".copy")
    file.rename(copy)
    file.symlink_to(copy)


@pytest.mark.parametrize("name", damages())
def test_damaged_files_are_logged_and_packed_again(
    name, backend, model, sources, folder, rng, caplog
):
    start(backend, model, sources)
    (file,) = packed(folder)
    damages()[name](file)
    with caplog.at_level(logging.WARNING, "inl.cpu"):
        found = start(backend, model, sources)
    (line,) = caplog.messages
    assert str(file) in line
    assert "packed again" in line
    assert not any(each.from_cache for each in found)
    check(backend, found, sources, rng)
    if name != "an empty folder":
        assert all(each.from_cache for each in start(backend, model, sources))


def test_files_of_another_user_are_not_used(
    backend, model, sources, folder, rng, caplog, monkeypatch
):
    start(backend, model, sources)
    (file,) = packed(folder)
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
    else:
        real = os.fstat
        monkeypatch.setattr(os, "fstat", lambda at: owned_by_other(real(at), file))
    found = start(backend, model, sources)
    (line,) = caplog.messages
    assert "belongs to user 12345" in line
    assert "packed again" in line
    check(backend, found, sources, rng)


def owned_by_other(facts, file):
    """The status of ``file`` with another owner."""
    if facts.st_ino != file.stat().st_ino:
        return facts
    fields = {name: getattr(facts, name) for name in dir(facts) if name[:3] == "st_"}
    return SimpleNamespace(**fields | {"st_uid": 12345})


def test_a_folder_of_another_user_is_not_used(
    backend, model, sources, folder, rng, caplog, monkeypatch
):
    start(backend, model, sources)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found = start(backend, model, sources)
    (line,) = caplog.messages
    assert f"{folder}: belongs to user" in line
    assert "not cached" in line
    assert not any(each.from_cache for each in found)


def test_a_link_in_place_of_the_folder_is_not_followed(
    backend, model, sources, folder, tmp_path, caplog
):
    folder.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    start(backend, model, sources)
    (line,) = caplog.messages
    assert f"{folder}: is a symbolic link" in line
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_folder_and_its_files_are_private(backend, model, sources, folder):
    """Whatever the umask is, and for a folder that others could enter."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    mask = os.umask(0)
    try:
        start(backend, model, sources)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_file_of_another_model_is_not_used_under_this_name(
    backend, model, sources, folder, rng, caplog
):
    other = model.with_name("other.gguf")
    other.write_bytes(changed_contents(model))
    start(backend, other, sources | {"qkv": [q4_0(rng, n) for n in (64, 16, 16)]})
    (planted,) = packed(folder)
    start(backend, model, sources)
    (mine,) = set(packed(folder)) - {planted}
    shutil.copy(planted, mine)
    found = start(backend, model, sources)
    (line,) = caplog.messages
    assert "not written for this place" in line
    check(backend, found, sources, rng)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [[[0], 0, 1 << 40]],
        [[[0], -64, 64]],
        [[[0], 1, 64]],
        [[[0], 0, -1]],
        [[[0], 64, 64], [[0], 0, 64]],
        [[[0], 0, 64], [[0], 0, 64]],
        [[[0], 0, 1e9]],
        [[[0], "0", 64]],
        [[[0], 0]],
        [[7, 0, 64]],
        [None],
        {"a": 1},
        "[" * 100000,
    ],
)
def test_wild_offsets_with_a_valid_signature_are_refused(parts):
    """The last defense: only who can read the folder signs such a description."""
    text = parts if isinstance(parts, str) else json.dumps([parts, "0"])
    with pytest.raises(Damaged, match="its description is invalid"):
        weight_cache_file._parsed(text.encode(), 2 << 20)


@pytest.mark.parametrize(
    "planted", [b"", b"junk", b"{}" * 999, "a FIFO", "a link", "a folder", "signed"]
)
def test_a_planted_record_of_digests_is_ignored(
    planted, backend, model, sources, folder, monkeypatch
):
    """It would otherwise name another file's weights."""
    monkeypatch.setattr(file_digest, "TICK_NS", -(10**15))
    start(backend, model, sources)
    record = folder / "digests"
    data = record.read_bytes()
    record.unlink()
    if planted == "a FIFO":
        os.mkfifo(record)
    elif planted == "a link":
        record.symlink_to("/dev/zero")
    elif planted == "a folder":
        record.mkdir()
    else:
        record.write_bytes(
            data[:-9] + b"f" + data[-8:] if planted == "signed" else planted
        )
    calls = []
    real = file_digest.content_digest
    monkeypatch.setattr(
        file_digest, "content_digest", lambda *args: calls.append(args) or real(*args)
    )
    assert all(each.from_cache for each in start(backend, model, sources))
    assert len(calls) == 2
