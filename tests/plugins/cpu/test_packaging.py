"""Names of the native library, in its build, its wheel and its loader."""

from __future__ import annotations

import fnmatch
import importlib.util
import tomllib
from pathlib import Path

import pytest

from inl_cpu import library

PACKAGE = Path(__file__).parents[3] / "plugins" / "inl-cpu"
BUILD = PACKAGE / "src" / "inl_cpu" / "build_native.py"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))


@pytest.fixture
def builder():
    spec = importlib.util.spec_from_file_location("native", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_build_and_the_loader_have_the_same_names(builder):
    assert builder.NAMES == library.NAMES
    assert builder.LIBRARY.name == library.LIBRARY_PATH.name


def test_a_wheel_takes_the_library_of_every_system(builder):
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["inl_cpu"]
    for name in ("libinl.so", *builder.NAMES.values()):
        assert any(fnmatch.fnmatch(f"native/{name}", each) for each in patterns), name


def test_the_compiler_may_have_arguments(builder, monkeypatch):
    monkeypatch.setenv("CXX", "python -m ziglang c++ -target aarch64-macos")
    monkeypatch.setattr(builder, "hardening", lambda _: ())
    words = ("python", "-m", "ziglang", "c++", "-target", "aarch64-macos")
    assert builder.compiler() == words
    assert tuple(builder.all_flags(())[: len(words)]) == words


def test_wheels_are_configured_for_every_system():
    wheels = PROJECT["tool"]["cibuildwheel"]
    assert wheels["linux"]["archs"] == ["x86_64", "aarch64"]
    assert wheels["macos"]["archs"] == ["arm64"]
    assert wheels["windows"]["archs"] == ["AMD64"]
    assert "ziglang c++" in wheels["windows"]["environment"]["CXX"]
