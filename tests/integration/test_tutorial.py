"""docs/writing-a-backend.md, followed to the letter in a fresh environment.

Both styles: the eager toy, and the traced scaffold.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-backend.md"
OFFLINE = re.compile(
    r"Name or service not known|Temporary failure|Max retries|timed out"
)


def blocks():
    return re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)


def run(command, folder, env):
    return subprocess.run(
        ["sh", "-e", "-c", command],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=folder,
        env=env,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A fresh environment, in a folder with the core, as in a checkout."""
    folder = tmp_path_factory.mktemp("tutorial")
    work = folder / "work"
    left = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    shutil.copytree(ROOT / "core", work / "core", ignore=left)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    dropped = ("PYTHONPATH", "INL_PLUGINS", "INL_CHECK_SEED", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {
        "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{env['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",
    }
    done = run("pip download -q --no-deps pluggy", folder, env)
    if done.returncode and OFFLINE.search(done.stdout + done.stderr):
        pytest.skip("the package index cannot be reached; this test installs packages")
    assert done.returncode == 0, done.stderr
    return work, env


def follow(place, commands):
    """Run commands of the page; returns what each printed."""
    work, env = place
    said = []
    for block in commands:
        done = run(block, work, env)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    return said


@pytest.mark.long
def test_the_eager_style_is_followed_to_the_letter(place):
    installed, checked, answered, tested = follow(place, blocks()[:4])
    assert "created inl-toy" in installed
    assert re.search(r"toy:0 passes all \d{3} checks", checked)
    assert len(answered.split()) >= 5
    assert re.search(r"^\d{3} passed", tested.splitlines()[-1].strip("= "))


@pytest.mark.long
def test_the_traced_style_is_followed_to_the_letter(place):
    """Installs JAX; elsewhere the same package is tested with the JAX that is here."""
    install, _, _ = blocks()[0].partition("\n")
    _, installed, checked, answered = follow(place, [install, *blocks()[4:]])
    assert "created inl-lazy" in installed
    assert re.search(r"lazy:0 passes all \d{3} checks", checked)
    assert len(answered.split()) >= 5
