"""Modules that an import loads."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inl

CLEAN = {key: value for key, value in os.environ.items() if key != "INL_PLUGINS"}
FRAMEWORKS = ["torch", "jax", "triton"]
MODULES = [
    "inl",
    "inl.device",
    "inl.plugin",
    "inl.plugin.builtin",
    "inl.spec.step",
    "inl.spec.message",
    "inl.spec.kernel",
    "inl.protocol.runner",
    "inl.cli.main",
]


def modules_after(code):
    """Names of the modules that a fresh interpreter has after ``code``."""
    report = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        env=CLEAN,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", MODULES)
def test_core_imports_no_framework_and_no_numpy(module):
    found = modules_after(f"import {module}")
    assert module in found
    assert found.isdisjoint([*FRAMEWORKS, "numpy"])


@pytest.mark.parametrize("name", inl.__all__)
def test_no_public_name_brings_a_framework(name):
    assert modules_after(f"import inl; inl.{name}").isdisjoint(FRAMEWORKS)


BESIDE = ("callers", "cli", "convert", "fleet", "serve", "testing", "tune")
"""Rooms that commands load, and programs do not."""


def test_an_engine_needs_no_command():
    code = (
        "from inl import EngineConfig, InferenceEngine\n"
        "from inl.checkpoints.hub.resolve import default_model\n"
        "config = EngineConfig(backend='reference', context=32, max_batch=1)\n"
        "with InferenceEngine.from_pretrained(default_model(), config) as engine:\n"
        "    assert engine.generate([[1, 2]], max_tokens=1)"
    )
    found = {name.partition(".")[2].partition(".")[0] for name in modules_after(code)
             if name.startswith("inl.")}  # fmt: skip
    assert "engine" in found
    assert found.isdisjoint(BESIDE)


def test_importing_inl_imports_no_plugin_machinery():
    assert modules_after("import inl").isdisjoint(["pluggy", "importlib.metadata"])


@pytest.mark.parametrize("command", ["devices", "plugins"])
def test_listing_imports_neither_framework_nor_numpy_nor_rich(command):
    code = f"from inl.cli.main import main; assert main(['{command}']) == 0"
    ours = modules_after(code) - modules_after("import typer")
    assert f"inl.cli.{command}" in ours
    assert ours.isdisjoint([*FRAMEWORKS, "numpy", "rich"])


def test_this_check_can_fail():
    assert "json" not in modules_after("import inl")
    assert "json" in modules_after("import json")


def test_every_public_name_is_there():
    assert sorted(inl.__all__) == inl.__all__
    assert set(inl.__all__) <= set(dir(inl))
    for name in inl.__all__:
        assert getattr(inl, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'inl' has no attribute 'nope'"):
        inl.nope  # noqa: B018


def test_the_version_is_the_distributions():
    project = Path(__file__).parents[2] / "core" / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == inl.__version__


@pytest.mark.parametrize(
    ("code", "most"),
    [("import inl", 60), ("from inl.cli.main import main; main(['devices'])", 450)],
    ids=["import", "devices"],
)
def test_few_modules_are_imported(code, most):
    """Start-up time, in modules; bench/bounds.py measures it in milliseconds."""
    assert len(modules_after(code) - modules_after("pass")) < most
