"""Bombs: files of some megabytes that unbounded readers turn into hundreds."""

from __future__ import annotations

import json
import struct
import sys
import zipfile

import pytest

from depth import mostly_full
from limited import run_limited
from torch_pickles import mapping, number, program, tensor, text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measured with /proc")

OVERHEAD = 64 << 20
"""Bytes that a reader may take beside three times its file."""
SECONDS = 5.0
"""Processor time that a reader may take."""

OPEN = """
from inl.checkpoints.checkpoint import open_checkpoint
import numpy

def work():
    checkpoint = open_checkpoint(sys.argv[1])
    for name in checkpoint.names():
        checkpoint.tensor(name)
    return len(checkpoint.names())
"""


def string(value):
    return struct.pack("<Q", len(value)) + value


def pair(key, kind, payload):
    return string(key) + struct.pack("<I", kind) + payload


def gguf(*pairs):
    named = pair(b"general.architecture", 8, string(b"x"))
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) + 1)
    return head + named + b"".join(pairs)


def array(kind, count, data):
    return struct.pack("<IQ", kind, count) + data


def header(raw):
    return struct.pack("<Q", len(raw)) + raw


def safetensors(count):
    fields = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    parts = (b'"%x":%s' % (number, fields) for number in range(count))
    return header(b"{" + b",".join(parts) + b"}")


def doubled(depth):
    """A tuple of a tuple of a tuple ..., each twice: exponential to hash or show."""
    parts = [b")", *(b"q%ch%c\x86" % (at, at) for at in range(depth))]
    return b"".join(parts)


def nested(depth):
    return b")" + b"\x85" * depth


def archive(path, code, members=(("0", bytes(48)),), extra=()):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", code)
        for key, data in members:
            file.writestr(f"m/data/{key}", data)
        for name in extra:
            file.writestr(name, b"")


def colliding(count):
    """Integers with one hash: multiples of the modulus of Python's hash."""
    keys = (at * (2**61 - 1) for at in range(1, count))
    items = (key.to_bytes(10, "little") for key in keys)
    return b"".join(b"\x8a\x0a" + item + b"N" for item in items)


PICKLES = {
    "dicts": b"\x80\x02](" + b"}" * 8_000_000 + b"e.",
    "numbers": b"\x80\x02](" + b"K\x01" * 4_000_000 + b"e.",
    "memo": b"\x80\x02]" + b"".join(b"r" + struct.pack("<I", n) for n in range(10**6)),
    "hashed nested names": b"\x80\x02" + nested(300_000) + text("x") + b"\x93.",
    "hashed doubled names": b"\x80\x02" + doubled(60) + text("x") + b"\x93.",
    "a shown doubled name": b"\x80\x02" + text("x") + doubled(60) + b"\x93.",
    "keys that collide": b"\x80\x02}(" + colliding(30_000) + b"u.",
    "one wide text": b"\x80\x02" + text("a" * 8_000_000 + "\U0001f600") + b".",
}
GGUFS = {
    "small numbers": gguf(pair(b"a", 9, array(0, 8_000_000, bytes(8_000_000)))),
    "booleans": gguf(pair(b"a", 9, array(7, 8_000_000, bytes(8_000_000)))),
    "empty strings": gguf(pair(b"a", 9, array(8, 2_000_000, bytes(16_000_000)))),
    "a string at the end that is not UTF-8": gguf(
        pair(b"a", 9, array(8, 10**6, string(b"ab") * (10**6 - 1) + string(b"\xff")))
    ),
    "long and empty strings": gguf(
        pair(b"a", 9, array(8, 8192, (string(b"x" * 2000) + string(b"")) * 4096))
    ),
    "short strings": gguf(pair(b"a", 9, array(8, 10**6, string(b"ab") * 10**6))),
    "arrays": gguf(pair(b"a", 9, array(9, 10**6, array(0, 0, b"") * 10**6))),
    "keys": gguf(*(pair(b"%x" % at, 0, b"\1") for at in range(600_000))),
}
JSONS = {
    "lists": b'{"a":[' + b",".join([b"[]"] * 2_500_000) + b"]}",
    "objects": b'{"a":[' + b",".join([b'{"":0}'] * 1_200_000) + b"]}",
    "zeros": b'{"a":[' + b",".join([b"0.5"] * 2_000_000) + b"]}",
    "keys": json.dumps(dict.fromkeys(map(str, range(700_000)))).encode(),
}


def bounded(found, size):
    print(found)
    assert found.result in ("read", "refused"), found
    assert found.seconds < SECONDS, found
    assert found.memory < 3 * size + OVERHEAD, (found, size)
    return found


@pytest.mark.parametrize("name", mostly_full(reversed(PICKLES), 4))
def test_pickles(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.pt"
    archive(path, PICKLES[name])
    found = bounded(run_limited(OPEN, tmp_path), path.stat().st_size)
    assert found.result == "refused"
    assert str(path) in found.message


def test_shared_storages(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    size = 2_000_000
    items = {str(at): tensor((size,), (1,), size=size) for at in range(80)}
    path = tmp_path / "model.pt"
    archive(path, program(items), [("0", bytes(4 * size))])
    found = bounded(run_limited(OPEN, tmp_path), path.stat().st_size)
    assert found.result == "refused"
    assert f"tensors of {80 * 4 * size} bytes" in found.message
    archive(path, program(dict(list(items.items())[:2])), [("0", bytes(4 * size))])
    assert bounded(run_limited(OPEN, tmp_path), 2 * 4 * size).result == "read"


@pytest.mark.full
def test_a_large_directory_of_an_archive(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.pt"
    names = [f"m/{at:x}" for at in range(100_000)]
    archive(path, program({"w": tensor((2,), (1,))}), extra=names)
    found = bounded(run_limited(OPEN, tmp_path), path.stat().st_size)
    assert "directory of the archive" in found.message


@pytest.mark.full
def test_a_training_checkpoint_of_many_tensors_is_read(tmp_path):
    """20,000 small tensors in nested dicts, which is more than models have."""
    (tmp_path / "config.json").write_text("{}")
    items = {f"layer.{at}.weight": tensor((3,), (1,), size=12) for at in range(20_000)}
    code = b"\x80\x02" + mapping({"epoch": number(3), "model": mapping(items)}) + b"."
    path = tmp_path / "model.pt"
    archive(path, code, [("0", bytes(48)), ("pad", bytes(20_000_000))])
    found = bounded(run_limited(OPEN, tmp_path), path.stat().st_size)
    assert (found.result, found.message) == ("read", "20000")


@pytest.mark.parametrize("name", mostly_full(GGUFS, 1))
def test_gguf_metadata(name, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUFS[name])
    bounded(run_limited(OPEN, path), path.stat().st_size)


@pytest.mark.parametrize("file", mostly_full(["config.json", "model.safetensors"]))
@pytest.mark.parametrize("name", mostly_full(JSONS))
def test_json(name, file, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    raw = JSONS[name] if file == "config.json" else header(JSONS[name])
    (tmp_path / file).write_bytes(raw)
    found = bounded(run_limited(OPEN, tmp_path), len(raw))
    assert found.result == "refused"
    assert str(tmp_path / file) in found.message


@pytest.mark.full
def test_safetensors_headers_of_empty_tensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(200_000))
    assert bounded(run_limited(OPEN, tmp_path), path.stat().st_size)
    path.write_bytes(safetensors(20_000))
    found = bounded(run_limited(OPEN, tmp_path), path.stat().st_size)
    assert (found.result, found.message) == ("read", "20000")
