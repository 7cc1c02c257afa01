"""Client programs from PyPI and npm against a server with the default model."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest

from http_servers import ServerProcess

SPEC = importlib.util.spec_from_file_location(
    "client_runner", Path(__file__).with_name("run.py")
)
runner = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = runner  # dataclasses look for it
SPEC.loader.exec_module(runner)
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_the_page_has_each_script():
    rows = re.findall(r"^\| ([\w-]+) \|.*\| `(\w+\.\w+)` \|$", PAGE.read_text(), re.M)
    assert dict(rows) == runner.CLIENTS
    assert len(rows) >= 20


@pytest.mark.parametrize("client", runner.CLIENTS)
def test_a_script_names_its_packages(client):
    packages, is_npm = runner.requirements(runner.CLIENTS[client])
    assert packages or client in ("curl", "open_webui")
    assert is_npm == runner.CLIENTS[client].endswith(".mjs")


def test_a_failed_case_is_in_the_table():
    result = runner.Result("a", "a.py", "1", {"plain": "ok", "stream": "failed: x"})
    assert result.failed == ["stream"]
    assert result.row() == "| a | 1 | plain, **stream failed** | `a.py` |"


@pytest.fixture(scope="module")
def url():
    with ServerProcess() as server:
        yield server.url


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", runner.CLIENTS)
def test_a_client_program_works(client, url):
    folder = Path(tempfile.gettempdir()) / "inl-clients"
    try:
        result = runner.run(client, url, folder)
    except runner.NotInstalled as error:
        pytest.skip(f"cannot be installed: {str(error)[:200]}")
    assert result.cases, result.output
    assert not result.failed, result.output
