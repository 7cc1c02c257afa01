"""Servers to test: a process with the default model, and threads without one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from http_servers import READY, HashServer


@pytest.fixture(scope="session")
def server_url(tmp_path_factory):
    """URL of an ``inl serve`` process with the default model."""
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "inl", "serve", "--port", "0", "--device", "cpu"]
    command += ["--max-batch", "4", "--context", "2048", "--name", "default"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        while not (found := READY.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        code = process.wait(60)
    assert code == 0, log.read_text()


@pytest.fixture(scope="session")
def hash_server():
    """A server whose tokens are hashes, with small bounds."""
    with HashServer(max_batch=4, max_queue=8) as server:
        yield server
