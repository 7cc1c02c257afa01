"""The cache of packed weights: reuse, damage, staleness, eviction, concurrency."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from inl.dtypes import HostArray, wrap
from inl.errors import DeviceError
from inl.weights.quant import dequantize
from inl_cpu import weight_cache, weight_cache_file
from inl_cpu.abi import Flag
from inl_cpu.kernels.dense import Products
from inl_cpu.matrix import pack_pairs, pack_rows
from inl_cpu.weight_cache import PackedWeightCache

COLUMNS = 256


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, in which small weights are cached too."""
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(weight_cache.VARIABLE, raising=False)
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path):
    """A file in place of a model; its bytes determine the cache file's name."""
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 8192)
    return file


def q4_0(rng, rows):
    """Rows of random codes with finite scales."""
    blocks = rng.integers(0, 256, (rows, COLUMNS // 32, 18), np.uint8)
    scales = rng.uniform(-1, 1, (rows, COLUMNS // 32)).astype(np.float16)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return HostArray(blocks.reshape(rows, -1), "q4_0", (rows, COLUMNS))


@pytest.fixture
def sources(rng):
    plain = rng.standard_normal((40, COLUMNS)).astype(np.float32)
    return {
        "qkv": [q4_0(rng, 64), q4_0(rng, 16), q4_0(rng, 16)],
        "gate": [q4_0(rng, 48), q4_0(rng, 48)],
        "plain": [wrap(plain)],
    }


def loading(backend, sources):
    """Packs some matrices in a fixed order, as a loader does."""

    def load():
        return (
            *pack_rows(sources["qkv"], "bfloat16", backend.emitter),
            *pack_pairs(*sources["gate"], "bfloat16", backend.emitter),
            *pack_rows(sources["plain"], "bfloat16", backend.emitter),
        )

    return load


def start(backend, model, sources):
    return PackedWeightCache(backend.emitter).load(
        [model], "bfloat16", loading(backend, sources)
    )


def product(backend, matrix, x):
    out = backend.emitter.new((len(x), matrix.rows))
    Products(backend.emitter, Flag.X_EXACT).product(x, matrix, out)
    return out


def check(backend, found, sources, rng):
    """Compare products with loaded matrices and with the sources."""
    x = rng.standard_normal((3, COLUMNS)).astype(np.float32)
    rows = np.concatenate([dequantize(each) for each in sources["qkv"]])
    product_of = product(backend, found[0], x)
    np.testing.assert_allclose(product_of, x @ rows.T, rtol=2e-2, atol=2e-1)


def test_the_second_start_maps_the_packed_weights(backend, model, sources, folder, rng):
    first = start(backend, model, sources)
    second = start(backend, model, sources)
    assert [each.from_cache for each in first] == [False] * 3
    assert [each.from_cache for each in second] == [True] * 3
    for old, new in zip(first, second, strict=True):
        assert np.array_equal(old.data, new.data)
    check(backend, second, sources, rng)
    assert len(list(folder.iterdir())) == 1


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
        "the description": flip(-200),
        "the digest": flip(-20),
        "the magic": flip(-1),
        "something else": lambda file: file.write_text("no weights at all " * 99),
        "a folder": lambda file: (file.unlink(), file.mkdir()),
    }


@pytest.mark.parametrize("name", damages())
def test_damaged_files_are_logged_and_packed_again(
    name, backend, model, sources, folder, rng, caplog
):
    start(backend, model, sources)
    (file,) = folder.iterdir()
    damages()[name](file)
    with caplog.at_level(logging.WARNING, "inl.cpu"):
        found = start(backend, model, sources)
    (line,) = caplog.messages
    assert str(file) in line
    assert "packed again" in line
    assert not any(each.from_cache for each in found)
    check(backend, found, sources, rng)
    if name != "a folder":
        assert all(each.from_cache for each in start(backend, model, sources))


def test_another_model_of_the_same_name_has_another_file(
    backend, model, sources, folder, rng
):
    start(backend, model, sources)
    model.write_bytes(bytes(256) * 8192)
    os.utime(model, (1, 1))
    sources = sources | {"qkv": [q4_0(rng, each.shape[0]) for each in sources["qkv"]]}
    found = start(backend, model, sources)
    assert not any(each.from_cache for each in found)
    check(backend, found, sources, rng)
    assert len(list(folder.iterdir())) == 2


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
        found = PackedWeightCache(backend.emitter).load([model], "bfloat16", load)
    assert "packed again" in caplog.text
    check(backend, load(), sources, rng)
    assert len(found) == {"more": 4, "fewer": 1}.get(change, 3)


def test_the_file_name_depends_on_all_inputs(backend, model, folder, monkeypatch):
    name = weight_cache.file_name([model], "bfloat16", backend.emitter)
    assert name == weight_cache.file_name([model], "bfloat16", backend.emitter)
    others = {weight_cache.file_name([model], "float32", backend.emitter)}
    with monkeypatch.context() as patch:
        patch.setattr("inl.__version__", "0.0.1")
        others.add(weight_cache.file_name([model], "bfloat16", backend.emitter))
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "ABI", 0)
        others.add(weight_cache.file_name([model], "bfloat16", backend.emitter))
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "LIBRARY_PATH", model)
        others.add(weight_cache.file_name([model], "bfloat16", backend.emitter))
    elsewhere = SimpleNamespace(machine=SimpleNamespace(isa="neon"))
    others.add(weight_cache.file_name([model], "bfloat16", elsewhere))
    data = bytearray(model.read_bytes())
    facts = model.stat()
    data[len(data) // 64 * 9 + 3] ^= 1
    model.write_bytes(data)
    os.utime(model, ns=(facts.st_mtime_ns, facts.st_mtime_ns))
    others.add(weight_cache.file_name([model], "bfloat16", backend.emitter))
    assert len(others - {name}) == 6


@pytest.mark.parametrize("obstacle", ["a file in its place", "no room", "full disk"])
def test_loading_continues_if_the_cache_cannot_be_written(
    obstacle, backend, model, sources, folder, rng, caplog, monkeypatch
):
    if obstacle == "a file in its place":
        folder.parent.write_text("in the way")
    elif obstacle == "no room":
        monkeypatch.setattr(weight_cache_file, "RESERVE", 1 << 60)
    else:
        monkeypatch.setattr(weight_cache_file, "_write_all", _full)
    with caplog.at_level(logging.INFO, "inl.cpu"):
        found = start(backend, model, sources)
    assert not any(each.from_cache for each in found)
    check(backend, found, sources, rng)
    (line,) = caplog.messages
    assert "are not cached" in line
    if folder.is_dir():
        assert list(folder.iterdir()) == []


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
    monkeypatch.setenv(weight_cache.VARIABLE, "maybe")
    with pytest.raises(DeviceError, match=r"INL_CPU_PACKED.*'maybe'.*accepted: off"):
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
    start(backend, model, sources)
    (mine,) = folder.iterdir()
    size = mine.stat().st_size
    old, older = folder / "old.tiles", folder / "older.tiles"
    for number, file in enumerate((older, old)):
        file.write_bytes(bytes(size))
        os.utime(file, (1000 + number, 1000 + number))
    abandoned, fresh = folder / "a.1-0.part", folder / "a.2-0.part"
    for file in (abandoned, fresh):
        file.write_bytes(b"half")
    hours_ago = time.time() - 2 * weight_cache_file.ABANDONED_SECONDS
    os.utime(abandoned, (hours_ago, hours_ago))
    monkeypatch.setattr(weight_cache_file, "BUDGET", 2 * size)
    weight_cache_file.evict(mine)
    assert set(folder.iterdir()) == {mine, old, fresh}


PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from inl.device import Device
from inl.dtypes import wrap
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
    found = cache.load([Path(sys.argv[1])], "bfloat16", load)
    plain = load()
    assert all(np.array_equal(a.data, b.data) for a, b in zip(found, plain))
    if sys.argv[2] == "removes":
        for file in (weight_cache.cache_folder() / "packed").glob("*.tiles"):
            file.unlink(missing_ok=True)
"""


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
