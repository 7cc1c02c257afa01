"""The engine and its commands where inl-toolkit is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest

import inl
from http_servers import ServerProcess
from inl.install_command import install_command

HIDE = """
import sys
from pathlib import Path

sys.path = [path for path in sys.path if not Path(path, "inl_toolkit").is_dir()]
"""
MESSAGES = """
from importlib import import_module
import sys
import inl

for name in sys.argv[1:]:
    try:
        getattr(inl, name) if "." not in name else import_module(name)
    except inl.InlError as error:
        assert isinstance(error, ImportError)
        print(error)
"""
NAMES = sorted({*inl.LAZY, *inl.LAZY_MODULES} - {*inl.__all__})
MODULES = ["inl.nn", "inl.nn.losses", "inl.kernels.tpu", "inl.functional.moe"]
PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def hidden(tmp_path, monkeypatch):
    """Hide inl-toolkit from the processes that a test starts."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(tmp_path), before]))
    monkeypatch.setenv("PYTHONPATH", path)


def run(*words):
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_names_raise_the_command_that_installs_it():
    lines = run("-c", MESSAGES, *NAMES, *MODULES).splitlines()
    assert len(lines) == len(NAMES) + len(MODULES) > 12
    for line in lines:
        assert line.startswith("inl-toolkit, which has inl.")
        assert line.endswith(f"is not installed. Try: {install_command('inl-toolkit')}")


def test_the_names_that_are_listed_are_there():
    names = set(run("-c", "import inl; from inl import *; print(*dir(inl))").split())
    assert set(inl.__all__) <= names
    assert names.isdisjoint(NAMES)


def test_generate_and_plan_work():
    words = [PROMPT, "--raw", "--max-tokens", "2", "--temperature", "0"]
    assert run("-m", "inl", "generate", *words).strip() == "Paris."
    plan = json.loads(run("-m", "inl", "plan", "--devices", "4x80GB", "--json"))
    assert plan["data_parallel"] == 4
    assert plan["fits"]


def test_serve_works():
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with ServerProcess() as server:
        request = Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = json.load(urlopen(request, timeout=300))
    assert answer["choices"][0]["text"].strip() == "Paris."
