"""INL on Windows, as far as a POSIX system can show it: by what Windows lacks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig, InferenceEngine
from inl.backend import host
from inl.errors import RunnerError
from inl.executor.model_loader import open_model
from inl.exit_status import describe_exit
from inl.file_lock import locked
from inl.readiness import READABLE, WRITABLE, SelectWaiter
from inl.testing.tiny import tiny_llama
from inl.text.template import ChatTemplate
from inl.workers import connection, process
from inl.workers.address import WorkerAddress

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="replaces POSIX by Windows")

ALL_MODULES = """
import sys
sys.path.insert(0, sys.argv[1])
from windows_host import become_windows
become_windows()
from importlib import import_module
from pathlib import Path
import inl, inl_cpu
count = 0
for package in (inl, inl_cpu):
    root = Path(package.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = [package.__name__, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] in ("__init__", "__main__"):
            parts.pop()
        try:
            import_module(".".join(parts))
        except ModuleNotFoundError as error:
            # An optional package. A module of POSIX must not be imported on Windows.
            assert (error.name or "").partition(".")[0] in ALLOWED, (parts, error)
        count += 1
print(count)
"""
GENERATION = """
import sys
sys.path.insert(0, sys.argv[1])
from windows_host import become_windows
become_windows()
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import open_model
for name in ("reference", "cpu"):
    config = EngineConfig(
        backend=name, dtype="float32", context=64, sampling="greedy", max_batch=2
    )
    with InferenceEngine(open_model(sys.argv[2]), config=config) as engine:
        print(*engine.generate([3, 4, 5], max_tokens=5).token_ids)
"""
OPTIONAL = """
    ai_edge_litert inl_jax inl_torch jax langchain_core llguidance msgspec opentelemetry
    prometheus_client starlette torch triton uvicorn
"""


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE), *map(str, arguments)],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hf, tensors = tiny_llama(np.random.default_rng(7))
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.full
def test_every_module_is_imported_without_posix():
    code = ALL_MODULES.replace("ALLOWED", repr(OPTIONAL.split()))
    assert int(run(code)[0]) > 300


@pytest.mark.full
def test_the_import_test_finds_a_module_of_posix():
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "from windows_host import become_windows; become_windows(); import fcntl"
    with pytest.raises(AssertionError, match="fcntl"):
        run(code)


@pytest.mark.full
def test_tokens_are_generated_without_posix(model):
    expected = run(GENERATION.replace("become_windows()", "pass"), model)
    assert run(GENERATION, model) == expected
    assert len(expected[0].split()) == 5


class Msvcrt(SimpleNamespace):
    """``msvcrt.locking``, by which one descriptor at a time has the first byte."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self):
        self.holder, self.guard = None, threading.Lock()

    def locking(self, descriptor, mode, count):
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        assert count == 1
        with self.guard:
            if mode == self.LK_UNLCK:
                assert self.holder == descriptor
                self.holder = None
            elif self.holder is None:
                self.holder = descriptor
            else:
                raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("system", ["posix", "windows"])
def test_a_file_lock_excludes_others(tmp_path, monkeypatch, system):
    if system == "windows":
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt())
    inside, most = [], []

    def work():
        for _ in range(5):
            with locked(tmp_path / "lock"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert most == [1] * 15


@pytest.fixture
def windows_workers(monkeypatch):
    """Workers connect to a local port."""
    monkeypatch.setattr(process, "new_connection", connection.LocalPort)
    monkeypatch.setattr("inl.protocol.wire.waiter", SelectWaiter)


@pytest.mark.full
def test_a_worker_connects_to_a_local_port(model, windows_workers):
    config = EngineConfig(
        backend=str(WorkerAddress(sys.executable, "reference")), dtype="float32",
        context=64, sampling="greedy", max_batch=2,
    )  # fmt: skip
    plain = EngineConfig(
        backend="reference", dtype="float32", context=64, sampling="greedy", max_batch=2
    )
    with InferenceEngine(open_model(model), config=plain) as engine:
        expected = engine.generate([3, 4, 5], max_tokens=5).token_ids
    with InferenceEngine(open_model(model), config=config) as engine:
        assert engine.generate([3, 4, 5], max_tokens=5).token_ids == expected


@pytest.mark.full
def test_a_worker_of_a_local_port_ends_with_its_parent():
    port = connection.LocalPort()
    child = subprocess.Popen(
        [sys.executable, "-m", process.MAIN, *port.arguments], **port.options
    )
    sock = port.connected(child)
    child.stdin.close()
    assert child.wait(300) == 1
    sock.close()
    port.close()


def test_a_stranger_at_the_port_is_refused():
    import socket

    port = connection.LocalPort()
    number = int(port.arguments[1])
    stranger = socket.create_connection(("127.0.0.1", number))
    stranger.sendall(b"0" * 64)
    code = (
        "import sys; from inl.workers.connection import connect_to_parent as c; "
        "c(int(sys.argv[1])).sendall(b'hello'); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(number)], **port.options)
    with port.connected(child) as accepted, stranger:
        assert accepted.recv(5) == b"hello"
        assert stranger.recv(1) == b""
    port.close()
    child.stdin.close()
    child.wait(300)


def test_a_worker_that_ends_at_once_is_an_error(windows_workers, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no interpreter\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RunnerError, match=r"(?s)exit status 3.*no interpreter"):
        process.WorkerProcess(str(broken))


def test_select_reports_what_poll_does():
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiter = SelectWaiter()
        waiter.register(ours, READABLE)
        assert waiter.poll(0) == []
        waiter.modify(ours, READABLE | WRITABLE)
        assert waiter.poll(None) == [(ours.fileno(), WRITABLE)]
        theirs.close()
        assert waiter.poll(None) == [(ours.fileno(), READABLE | WRITABLE)]


def test_templates_render_and_are_killed_without_select(monkeypatch):
    monkeypatch.setattr("inl.bounded_child.waiter", None)
    monkeypatch.setattr("inl.bounded_child.sys.platform", "win32")
    template = ChatTemplate("{{ messages[0]['content'] }}")
    assert template.apply([{"role": "user", "content": "hello"}]) == "hello"
    child = template._process._child
    assert template._process.receive(0.2) is None
    assert child.wait(300) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0xC0000005, "crashed with status 0xc0000005 (access violation)"),
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL (signal 9)"),
        (-250, "was killed by an unknown signal (signal 250)"),
    ],
)
def test_ends_of_processes_are_described(status, words):
    assert describe_exit(status) == words


def test_memory_is_read_from_windows(monkeypatch):
    def read(pointer):
        status = pointer._obj
        assert status.length == ctypes.sizeof(status) == 64
        status.total, status.available = 16 << 30, 5 << 30
        return 1

    kernel = SimpleNamespace(GlobalMemoryStatusEx=read)
    monkeypatch.setattr(sys, "platform", "win32")
    fake = SimpleNamespace(kernel32=kernel)
    monkeypatch.setattr(ctypes, "windll", fake, raising=False)
    assert host.host_memory() == (16 << 30, 5 << 30)
    kernel.GlobalMemoryStatusEx = lambda _: 0
    assert host.host_memory() == (8 << 30, 4 << 30)


class WindowsLoop:
    """An event loop without ``add_signal_handler``."""

    def __init__(self):
        self.called = []

    def add_signal_handler(self, *_):
        raise NotImplementedError

    def call_soon_threadsafe(self, call):
        self.called.append(call)


def test_the_server_stops_at_signals_of_windows(monkeypatch):
    signals = pytest.importorskip("inl.serve.signals", reason="needs inl-core[serve]")
    loop, handlers = WindowsLoop(), {}
    monkeypatch.setattr(signals.asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr(signals.signal, "SIGBREAK", 21, raising=False)
    monkeypatch.setattr(signals.signal, "signal", handlers.__setitem__)
    stop = object()
    signals.handle_signals(stop)
    assert sorted(handlers) == sorted([signal.SIGTERM, signal.SIGINT, 21])
    for handler in handlers.values():
        handler(21, None)
    assert loop.called == [stop] * 3
