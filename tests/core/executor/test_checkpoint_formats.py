"""Checkpoints in formats that plugins read."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from inl.errors import CheckpointError
from inl.executor import checkpoint_formats
from inl.executor.checkpoint_formats import open_checkpoint
from inl.plugin import load_registry
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

PLUGIN = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_formats(register):
    register(".acme", "fake_formats:read")
    register(".tar.acme", "fake_formats:read_tar")
    register(".broken", "fake_formats:fail")
    register(".odd", "fake_formats:odd")
    register(".absent", "nowhere_at_all:read")

def read(path):
    from inl.testing.tiny import MemoryCheckpoint
    checkpoint = MemoryCheckpoint({"kind": "acme"}, {})
    checkpoint.path = path
    return checkpoint

def read_tar(path):
    checkpoint = read(path)
    checkpoint.config["kind"] = "tar"
    return checkpoint

def fail(path):
    raise EOFError("ends at byte 7")

def odd(path):
    return {"x": 1}
"""


@pytest.fixture(autouse=True)
def formats(monkeypatch, tmp_path):
    (tmp_path / "fake_formats.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    known = load_registry((), ["fake_formats"])
    assert known.failed == ()
    monkeypatch.setattr(checkpoint_formats, "registry", lambda: known)
    yield
    del sys.modules["fake_formats"]


@pytest.fixture
def file(tmp_path):
    """Writes a file of a name, in a folder of its own."""

    def write(name, data=b"data"):
        path = tmp_path / "models" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path

    return write


def test_the_suffix_decides(file):
    assert open_checkpoint(file("m.acme")).config == {"kind": "acme"}
    path = file("m.tar.acme")
    found = open_checkpoint(str(path))
    assert (found.config, found.path) == ({"kind": "tar"}, path)


def test_a_folder_of_the_format(file, tmp_path):
    folder = tmp_path / "folder.acme"
    folder.mkdir()
    assert open_checkpoint(folder).path == folder


def test_a_folder_with_one_such_file(file):
    path = file("m.acme")
    file("readme.md")
    assert open_checkpoint(path.parent).path == path
    file("n.acme")
    with pytest.raises(CheckpointError, match=r"found m\.acme, n\.acme, readme\.md"):
        open_checkpoint(path.parent)


def test_what_the_core_reads_is_the_cores(file, monkeypatch):
    def fail():
        raise AssertionError("plugins were loaded")

    monkeypatch.setattr(checkpoint_formats, "registry", fail)
    with pytest.raises(CheckpointError, match="version: found the end of the file"):
        open_checkpoint(file("m.acme", b"GGUF"))
    folder = file("config.json", b"[]").parent
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m.broken", "fake_formats .* cannot read it: EOFError: ends at byte 7"),
        ("m.odd", "format .odd: found dict, accepted: a Checkpoint"),
        ("m.absent", "cannot load format .absent, nowhere_at_all:read: ModuleNotFound"),
        ("m.other", "found a file that begins b'data'; accepted: a folder with"),
        ("m.pt", "a pt file alone has no config"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_model(file, name, words):
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(file(name))


def test_an_engine_computes_with_it(file, monkeypatch):
    from inl import EngineConfig, InferenceEngine
    from inl.executor.model_loader import open_model

    made = tiny_llama(np.random.default_rng(3), vocab=96)
    path = file("tiny.acme")
    tokens = []
    for opened in (path, None):
        read = lambda _, files=made: MemoryCheckpoint(*files)  # noqa: E731
        monkeypatch.setattr(sys.modules["fake_formats"], "read", read)
        model = open_model(path) if opened else _plain(made)
        with InferenceEngine(
            model, config=EngineConfig(backend="reference", context=32)
        ) as engine:
            handle = engine.submit([1, 2, 3], max_tokens=5, temperature=0)
            while not handle.completed:
                engine.step()
            tokens.append(handle.completion().token_ids)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 5


def _plain(made):
    from inl.executor.model_loader import read_model

    return read_model(MemoryCheckpoint(*made))
