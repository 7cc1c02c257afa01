"""Servers to test: a process with the default model, and threads without one."""

from __future__ import annotations

import pytest

from http_servers import HashServer, ServerProcess


@pytest.fixture(scope="session")
def server_url():
    """URL of an ``inl serve`` process with the default model."""
    with ServerProcess() as server:
        yield server.url


@pytest.fixture(scope="session")
def hash_server():
    """A server whose tokens are hashes, with small bounds."""
    with HashServer(max_batch=4, max_queue=8) as server:
        yield server
