"""The callers in C++ and Rust of examples/, built and run against ``inl pipe``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from inl import EngineConfig, InferenceEngine

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = 'The "capital"\n\tof França is'
CONFIG = {"backend": "cpu", "context": 512}
RUSTC = shutil.which("rustc") or shutil.which("rustc", path=Path.home() / ".cargo/bin")
BUILDS = {
    "cpp": [
        shutil.which("g++"), "-std=c++17", "-Wall", "-Wextra", "-Werror",
        EXAMPLES / "cpp" / "stream.cpp",
    ],
    "rust": [
        RUSTC, "--edition", "2021", "-D", "warnings", EXAMPLES / "rust" / "stream.rs",
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=BUILDS)
def program(request, tmp_path_factory):
    """A caller, as an executable file."""
    command = BUILDS[request.param]
    if command[0] is None:
        package = {"cpp": "g++", "rust": "rustc"}[request.param]
        pytest.skip(f"{package} is not installed: apt-get install {package}")
    made = tmp_path_factory.mktemp("callers") / request.param
    subprocess.run([*command, "-o", made], check=True, timeout=300)
    return made


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """``inl`` of this interpreter, as one file."""
    made = tmp_path_factory.mktemp("bin") / "inl"
    made.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inl "$@"\n')
    made.chmod(0o755)
    return made


def start(program, script, *words, **config):
    setting = json.dumps({**CONFIG, **config})
    return subprocess.Popen(
        [program, "", PROMPT, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "INL": str(script), "CONFIG": setting},
    )


def run(program, script, *words, **config):
    child = start(program, script, *words, **config)
    output, errors = child.communicate(timeout=300)
    return child.returncode, output, errors


@pytest.fixture(scope="module")
def completion():
    config = EngineConfig(**CONFIG)
    with InferenceEngine.from_pretrained(None, config) as engine:
        return engine.generate(PROMPT, max_tokens=12)


def test_tokens_equal_those_of_python(program, script, completion):
    code, output, errors = run(program, script, 12)
    ids = "".join(f" {token}" for token in completion.token_ids)
    last = f"{completion.finish_reason} after {completion.prompt_tokens}:{ids}"
    assert code == 0, errors
    assert output == f"{completion.text}\n{last}\n"


def test_a_stream_is_aborted(program, script, completion):
    code, output, _ = run(program, script, 400, 3)
    head, _, last = output.rstrip("\n").rpartition("\n")
    reason, _, ids = last.partition(":")
    found = list(map(int, ids.split()))
    assert code == 0
    assert reason.startswith("cancelled after ")
    assert 3 <= len(found) < 400
    assert found[:3] == list(completion.token_ids[:3])
    assert completion.text.startswith(head) or head.startswith(completion.text)


def children(pid):
    return [
        int(number)
        for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


@pytest.mark.parametrize("victim", ["process", "worker"])
def test_a_killed_process_is_named(program, script, victim):
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc to find the process")
    config = {}
    if victim == "worker":
        config["backend"] = f"worker:{sys.executable}/cpu"
    code = 0
    while not code:  # a busy machine may kill it only after its last token
        child = start(program, script, 500, **config)
        assert child.stdout.read(1)
        with suppress(FileNotFoundError, ProcessLookupError):
            for pid in children(child.pid):
                last = children(pid)[-1:] if victim == "worker" else [pid]
                for each in last:
                    os.kill(each, signal.SIGKILL)
        _, errors = child.communicate(timeout=300)
        code = child.returncode
    assert code == 1
    last = errors.splitlines()[-1]
    if victim == "process":
        assert last == "inl: the process was ended by signal 9"
    else:
        assert last.startswith("inl: WorkerLost: ")


def frame(kind, payload):
    size = len(payload).to_bytes(4, "little")
    return b"IC" + kind.to_bytes(2, "little") + size + payload


PEERS = {
    "found protocol version 2, this client has 1": frame(1, b"\2\0\0\0"),
    "found bytes that are not a frame": b"Segmentation fault\n",
    "found frame kind 6, accepted: 1": frame(6, bytes(4)),
    "found a payload of 4294967295 bytes": b"IC\1\0\xff\xff\xff\xff",
    "a payload ends too early": frame(1, b"12"),
    "ModelError: no": frame(8, bytes(4) + b"ModelError: no"),
}  # fmt: skip
"""A sentence of the caller, and what the other side sends first."""


@pytest.mark.parametrize("sentence", PEERS)
def test_another_peer_is_named(program, tmp_path, sentence):
    (tmp_path / "bytes").write_bytes(PEERS[sentence])
    peer = tmp_path / "peer"
    # Stays until its input is closed, as inl does.
    peer.write_text(f'#!/bin/sh\ncat "{tmp_path}/bytes"; cat > /dev/null\n')
    peer.chmod(0o755)
    code, _, errors = run(program, peer, 5)
    assert code == 1
    assert errors.splitlines()[-1].startswith(f"inl: {sentence}")


def test_an_error_of_inl_reaches_the_caller(program, script):
    code, _, errors = run(program, script, 5, bits=4)
    assert code == 1
    last = errors.splitlines()[-1]
    assert last.startswith("inl: RequestError: OPEN: found ['bits']")


def test_a_process_that_does_not_start_is_named(program, tmp_path):
    code, _, errors = run(program, tmp_path / "absent", 5)
    assert code == 1
    assert "could not be started" in errors
