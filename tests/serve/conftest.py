"""Servers to test: a process with the default model, and threads without one.

Those of ``any_`` are two: the engine's own server, and one with front-end processes.
"""

from __future__ import annotations

import pytest

from browsers import CHROMIUM
from depth import mostly_full, mostly_long
from http_servers import HashServer, ServerProcess

SMALL = {"max_batch": 4, "max_queue": 8, "keep_alive_seconds": 3600}


@pytest.fixture(scope="session")
def server_url():
    """URL of an ``inl serve`` process with the default model."""
    with ServerProcess() as server:
        yield server.url


@pytest.fixture(scope="session", params=mostly_full([0, 2]))
def any_server_url(request):
    """As ``server_url``, without and with front-ends."""
    if not request.param:
        yield request.getfixturevalue("server_url")
        return
    with ServerProcess("--frontends", str(request.param)) as server:
        yield server.url


@pytest.fixture(scope="session")
def hash_server():
    """A server whose tokens are hashes, with small bounds and no idle comments."""
    with HashServer(**SMALL) as server:
        yield server


@pytest.fixture(scope="session", params=mostly_long([0, 2]))
def any_hash_server(request):
    """As ``hash_server``, without and with front-ends."""
    if not request.param:
        yield request.getfixturevalue("hash_server")
        return
    with HashServer(**SMALL, frontends=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()
