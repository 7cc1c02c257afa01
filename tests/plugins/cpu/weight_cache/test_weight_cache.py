"""The cache of packed weights: reuse, staleness, eviction, concurrency."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from inl.backend.weight_cache import FileIdentity
from inl.cache_dir import file_digest, packed_folder, private_folder
from inl.cache_dir.private_folder import PrivateFolder
from inl.errors import DeviceError
from inl_cpu import weight_cache, weight_cache_file
from inl_cpu.matrix import pack_rows
from inl_cpu.weight_cache import PackedWeightCache
from packed_weights import (
    changed_contents,
    check,
    loading,
    packed,
    q4_0,
    start,
)


def test_the_second_start_maps_the_packed_weights(backend, model, sources, folder, rng):
    first = start(backend, model, sources)
    second = start(backend, model, sources)
    assert [each.from_cache for each in first] == [False] * 3
    assert [each.from_cache for each in second] == [True] * 3
    for old, new in zip(first, second, strict=True):
        assert np.array_equal(old.data, new.data)
    check(backend, second, sources, rng)
    assert len(packed(folder)) == 1


def test_a_new_model_is_hashed_after_it_is_packed(
    backend, model, sources, folder, monkeypatch
):
    order = []
    real = file_digest.content_digest

    def digest(*args):
        order.append("hashed")
        return real(*args)

    def load():
        order.append("packed")
        return loading(backend, sources)()

    monkeypatch.setattr(file_digest, "content_digest", digest)
    other = model.with_name("other.gguf")
    other.write_bytes(b"short" * 999)
    for path in (model, other):
        cache = PackedWeightCache(backend.emitter)
        cache.load({path: FileIdentity.of(path.stat())}, "bfloat16", load)
        cache.finish()
        assert order.pop(0) == "packed"
        assert set(order) == {"hashed"}
        order.clear()
    assert len(packed(folder)) == 2


def test_weights_are_usable_while_they_are_saved(
    backend, model, sources, folder, rng, monkeypatch
):
    """Also while a step is recorded, which must not record the saving."""
    release, write = threading.Event(), weight_cache_file.write

    def wait_and_write(*args):
        assert release.wait(300)
        write(*args)

    monkeypatch.setattr(weight_cache, "write", wait_and_write)
    opened = {model: FileIdentity.of(model.stat())}
    cache = PackedWeightCache(backend.emitter)
    first = cache.load(opened, "bfloat16", loading(backend, sources))
    check(backend, first, sources, rng)
    assert packed(folder) == []
    with backend.emitter.record() as recording:
        release.set()
        cache.finish()
        assert recording.steps == []
    second = start(backend, model, sources)
    assert all(each.from_cache for each in second)
    for old, new in zip(first, second, strict=True):
        assert np.array_equal(old.data, new.data)


def replace_file(model):
    other = model.with_suffix(".new")
    other.write_bytes(changed_contents(model))
    copy_times(model, other)
    other.replace(model)


def overwrite_file(model):
    """A change of one bit that keeps inode, size and modification time."""
    facts = model.stat()
    data = changed_contents(model)
    with model.open("r+b") as file:
        file.write(data)
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def copy_times(model, other):
    facts = model.stat()
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("change", [replace_file, overwrite_file])
def test_another_model_of_the_same_name_has_another_file(
    change, backend, model, sources, folder, rng, monkeypatch
):
    monkeypatch.setattr(file_digest, "TICK_NS", 0)
    start(backend, model, sources)
    change(model)
    sources = sources | {"qkv": [q4_0(rng, each.shape[0]) for each in sources["qkv"]]}
    found = start(backend, model, sources)
    assert not any(each.from_cache for each in found)
    check(backend, found, sources, rng)
    assert len(packed(folder)) == 2


@pytest.mark.parametrize("change", ["numbers", "order", "shape", "more", "fewer"])
def test_stale_files_of_the_same_name_are_detected(
    change, backend, model, sources, folder, rng, caplog
):
    """As if the packing code had changed without a new version."""
    start(backend, model, sources)
    q, k, v = sources["qkv"]
    other = {
        "numbers": {"qkv": [q4_0(rng, 64), k, v]},
        "order": {"gate": sources["gate"][::-1]},
        "shape": {"qkv": [q, k]},
        "more": {"plain": [q, sources["plain"][0]]},
        "fewer": {},
    }
    sources = sources | other[change]
    load = loading(backend, sources)
    if change == "fewer":

        def load():
            return pack_rows(sources["qkv"], "bfloat16", backend.emitter)

    with caplog.at_level(logging.WARNING, "inl.cpu"):
        found = PackedWeightCache(backend.emitter).load({model: None}, "bfloat16", load)
    (line,) = caplog.messages
    assert "packed again" in line
    check(backend, load(), sources, rng)
    assert len(found) == {"more": 4, "fewer": 1}.get(change, 3)


def test_the_file_name_depends_on_all_inputs(backend, model, folder, monkeypatch):
    with PrivateFolder(folder, create=True) as opened:

        def name(dtype="bfloat16", emitter=backend.emitter):
            names = weight_cache.FileNames({model: None}, dtype, emitter)
            return names.complete(opened)

        first = name()
        assert first == name()
        others = {name("float32")}
        elsewhere = SimpleNamespace(machine=SimpleNamespace(isa="neon"))
        others.add(name(emitter=elsewhere))
        for target, value in {
            "inl.__version__": "0.0.1",
            "inl_cpu.weight_cache.ABI": 0,
            "inl_cpu.weight_cache.LIBRARY_PATH": model,
        }.items():
            with monkeypatch.context() as patch:
                patch.setattr(target, value)
                others.add(name())
        overwrite_file(model)
        others.add(name())
        assert len(others - {first}) == 6


def test_a_copy_of_the_model_uses_the_same_file(backend, model, sources, folder):
    start(backend, model, sources)
    copy = Path(shutil.copy(model, model.with_name("copy.gguf")))
    assert all(each.from_cache for each in start(backend, copy, sources))


def test_the_second_start_hashes_no_file_again(
    backend, model, sources, folder, monkeypatch
):
    monkeypatch.setattr(file_digest, "TICK_NS", -(10**15))
    start(backend, model, sources)
    monkeypatch.setattr(file_digest, "content_digest", None)
    assert all(each.from_cache for each in start(backend, model, sources))
    model.touch()
    with pytest.raises(TypeError):
        start(backend, model, sources)


@pytest.mark.parametrize("when", ["before hashing", "while packing"])
def test_a_file_that_changes_after_it_was_opened_is_not_cached(
    when, backend, model, sources, folder, rng, caplog
):
    opened = {model: FileIdentity.of(model.stat())}
    if when == "before hashing":
        replace_file(model)
    load = loading(backend, sources)

    def changing():
        if when == "while packing":
            replace_file(model)
        return load()

    cache = PackedWeightCache(backend.emitter)
    found = cache.load(opened, "bfloat16", changing)
    cache.finish()
    check(backend, found, sources, rng)
    assert packed(folder) == []
    (line,) = caplog.messages
    assert "model.gguf: changed after it was opened" in line


@pytest.mark.parametrize("obstacle", ["a file in its place", "no room", "full disk"])
def test_loading_continues_if_the_cache_cannot_be_written(
    obstacle, backend, model, sources, folder, rng, caplog, monkeypatch
):
    if obstacle == "a file in its place":
        folder.parent.write_text("in the way")
    elif obstacle == "no room":
        monkeypatch.setattr(packed_folder, "RESERVE", 1 << 60)
    else:
        monkeypatch.setattr(weight_cache_file, "_pages", _full)
    with caplog.at_level(logging.INFO, "inl.cpu"):
        found = start(backend, model, sources)
    assert not any(each.from_cache for each in found)
    check(backend, found, sources, rng)
    (line,) = caplog.messages
    assert "are not cached" in line
    assert not folder.is_dir() or not {*folder.glob("*.tiles"), *folder.glob("*.part")}


def _full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users")
def test_a_read_only_folder_is_used(backend, model, sources, folder):
    """A filled folder is only read; root may write anyway."""
    start(backend, model, sources)
    folder.chmod(0o555)
    try:
        assert all(each.from_cache for each in start(backend, model, sources))
    finally:
        folder.chmod(0o755)


def test_the_cache_can_be_disabled(backend, model, sources, folder, monkeypatch):
    monkeypatch.setenv(weight_cache.VARIABLE, "off")
    start(backend, model, sources)
    assert not folder.exists()
    for value in ("maybe", "0", "-1", "nan", "inf", "1e-30"):
        monkeypatch.setenv(weight_cache.VARIABLE, value)
        with pytest.raises(DeviceError, match=rf"INL_CPU_PACKED.*'{value}'.*: off, or"):
            start(backend, model, sources)


def test_small_weights_are_not_cached(backend, model, sources, folder):
    weight_cache.MIN_BYTES = 1 << 30  # restored by the fixture
    start(backend, model, sources)
    assert not folder.exists()


def test_files_are_read_without_huge_pages(
    backend, model, sources, folder, rng, monkeypatch
):
    start(backend, model, sources)
    monkeypatch.setattr(weight_cache_file, "_huge_page_bytes", lambda: 0)
    found = start(backend, model, sources)
    assert all(each.from_cache and each.data.flags.writeable for each in found)
    check(backend, found, sources, rng)


def test_the_least_recently_used_files_are_evicted(
    backend, model, sources, folder, monkeypatch
):
    """The limit holds for all files together, before the new one is written."""
    start(backend, model, sources)
    (first,) = packed(folder)
    size = first.stat().st_size
    old, older = folder / "old.tiles", folder / "older.tiles"
    for number, file in enumerate((older, old)):
        file.write_bytes(bytes(size))
        os.utime(file, (1000 + number, 1000 + number))
    abandoned, fresh = folder / "a.1-0.part", folder / "a.2-0.part"
    for file in (abandoned, fresh):
        file.write_bytes(b"half")
    hours_ago = time.time() - 2 * private_folder.ABANDONED_SECONDS
    os.utime(abandoned, (hours_ago, hours_ago))
    monkeypatch.setenv(weight_cache.VARIABLE, str(3 * size / 2**30))
    replace_file(model)
    start(backend, model, sources)
    (second,) = set(packed(folder)) - {first, old, older}
    assert set(packed(folder)) == {first, old, second}
    assert list(folder.glob("*.part")) == [fresh]


def test_a_use_counts_for_eviction(backend, model, sources, folder):
    start(backend, model, sources)
    (file,) = packed(folder)
    os.utime(file, (1000, 1000))
    start(backend, model, sources)
    assert file.stat().st_mtime > 1000


def test_weights_above_the_limit_are_not_cached(
    backend, model, sources, folder, caplog, monkeypatch
):
    monkeypatch.setenv(weight_cache.VARIABLE, "0.0019")
    with caplog.at_level(logging.INFO, "inl.cpu"):
        start(backend, model, sources)
    assert packed(folder) == []
    assert "exceed the limit" in caplog.text


def test_the_default_limit_is_a_tenth_of_the_disk(tmp_path, monkeypatch):
    with PrivateFolder(tmp_path) as folder:
        monkeypatch.setattr(folder, "disk_bytes", lambda: 100 << 30)
        assert packed_folder.default_limit(folder) == 10 << 30
        monkeypatch.setattr(folder, "disk_bytes", lambda: 100 << 40)
        assert packed_folder.default_limit(folder) == 32 << 30


PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from inl.device import Device
from inl.dtypes import wrap
from inl.cache_dir import packed_folder
from inl_cpu import weight_cache
from inl_cpu.matrix import pack_rows
from inl_cpu.native_backend import NativeBackend
weight_cache.MIN_BYTES = 1
emitter = NativeBackend(Device("cpu")).emitter
rng = np.random.default_rng(3)
sources = [wrap(rng.standard_normal((512, 512)).astype(np.float32)) for _ in range(8)]
sys.stdin.readline()
for _ in range(20):
    load = lambda: [pack_rows([each], "bfloat16", emitter)[0] for each in sources]
    cache = weight_cache.PackedWeightCache(emitter)
    found = cache.load({Path(sys.argv[1]): None}, "bfloat16", load)
    plain = load()
    assert all(np.array_equal(a.data, b.data) for a, b in zip(found, plain))
    if sys.argv[2] == "removes":
        for file in packed_folder.packed_folder().glob("*.tiles"):
            file.unlink(missing_ok=True)
"""


def test_a_process_that_ends_at_once_hashes_and_saves(model, folder):
    program = (
        PROGRAM.partition("sys.stdin")[0]
        + """
load = lambda: [pack_rows([each], "bfloat16", emitter)[0] for each in sources]
weight_cache.PackedWeightCache(emitter).load({Path(sys.argv[1]): None}, "", load)
"""
    )
    command = [sys.executable, "-W", "error", "-c", program, str(model)]
    subprocess.run(command, check=True, timeout=300)
    assert len(packed(folder)) == 1


def test_concurrent_processes(backend, model, folder):
    """Three processes read and write the cache; one of them keeps removing the file."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(model)]
    roles = ("keeps", "keeps", "removes")
    running = [
        subprocess.Popen(
            [*command, role], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for role in roles
    ]
    errors = [process.communicate("go\n", timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert "again" not in "".join(errors)
    assert not list(folder.glob("*.part"))


def test_another_division_of_the_weights_has_a_file_of_its_own(
    backend, model, sources, folder, caplog
):
    """With adapters, gated layers are packed as three linear layers."""

    def divided():
        return [
            matrix
            for gate in sources["gate"]
            for matrix in pack_rows([gate], "bfloat16", backend.emitter)
        ]

    opened = {model: FileIdentity.of(model.stat())}
    start(backend, model, sources)
    (plain,) = packed(folder)
    before = plain.stat().st_ino  # a file that is packed again is a new one
    for _ in range(2):
        cache = PackedWeightCache(backend.emitter)
        cache.load(opened, "bfloat16", divided, variant="adapters")
        cache.finish()
        start(backend, model, sources)
    assert len(packed(folder)) == 2
    assert plain.stat().st_ino == before
    assert "holds other matrices" not in caplog.text
