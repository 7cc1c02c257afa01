"""Wheels of every package: what is in them, and that they work where installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from depth import mostly_drawn

ROOT = Path(__file__).parents[2]
PACKAGES = {
    path.parent.name if path.parent.name != "core" else "inl-core": path.parent
    for pattern in ("core", "libs/*", "plugins/*", "examples/*")
    for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
}
VERSIONS = ("3.11", "3.12", "3.13")
OFFLINE = re.compile(
    r"Name or service not known|Temporary failure|Max retries|timed out"
)
COMPILER = """#!/bin/sh
exec {} "$@" -O0
"""
"""Compiles the native library without optimizing it: quickly."""

LEFT = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", "*.so")


def run(*words, **settings):
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=580,
        **settings,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Folder with a wheel of each package, built apart from the tree."""
    folder, tree = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("tree")
    compiler = tree / "compiler"
    compiler.write_text(COMPILER.format(os.environ.get("CXX", "c++")))
    compiler.chmod(0o755)
    for name in ("core", "libs", "plugins", "deploy", "examples/inl-toy"):
        shutil.copytree(ROOT / name, tree / name, ignore=LEFT)
    # What an older build left is not in a wheel.
    stale = tree / "plugins/inl-cpu/build/lib/inl_cpu/stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    # Without isolation pip need not install setuptools for each of them.
    script = (sys.executable, tree / "deploy/wheels.py", folder, "--record")
    env = os.environ | {"CXX": str(compiler)}
    done = run(*script, "--no-build-isolation", env=env)
    assert done.returncode == 0, done.stderr
    assert "inl-cpu: compiled 1 of " in done.stderr
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder]
    pip += ["--no-build-isolation", "--disable-pip-version-check"]
    done = run(*pip, tree / "examples/inl-toy")
    assert done.returncode == 0, done.stderr
    return folder


def members(wheels, name):
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_its_package_its_license_and_no_tests(wheels, name):
    found = members(wheels, name)
    package = "inl" if name == "inl-core" else name.replace("-", "_")
    tops = {path.partition("/")[0] for path in found}
    assert tops == {package, *(top for top in tops if top.endswith(".dist-info"))}
    assert len(tops) == 2
    assert any(path.endswith("/licenses/LICENSE") for path in found)
    own_tests = [
        path for path in found if re.search(r"(^|/)(tests?/|test_|conftest)", path)
    ]
    assert own_tests == []
    assert not any(path.endswith("stale.py") for path in found)
    if name != "inl-toy":
        assert f"{package}/py.typed" in found


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "inl-toy"])
def test_each_package_brings_the_license_of_the_whole(name):
    text = (PACKAGES[name] / "LICENSE").read_bytes()
    assert text == (ROOT / "LICENSE").read_bytes()


def places(version):
    """Pythons that may have this version: on the path, and those that pyenv keeps."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = shutil.which(f"python{version}")
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return [*([found] if found else []), *kept]


def interpreter(version):
    """A Python of this version, if there is one."""
    for place in places(version):
        done = run(place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if done.stdout.strip() == version:
            return place
    return None


PRESENT = [version for version in VERSIONS if places(version)]


@pytest.fixture(params=mostly_drawn(PRESENT or VERSIONS))
def installed(request, wheels, tmp_path):
    """Folder of a fresh environment with the core, the toy and the bare plugins."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    assert run(python, "-m", "venv", tmp_path).returncode == 0
    pip = [tmp_path / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
    pip += ["--disable-pip-version-check", "--find-links", wheels]
    # What PYTHONPATH has would count as installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run(*pip, "inl-core[cli]", "inl-toy", "inl-cpu", env=env)
    if done.returncode and OFFLINE.search(done.stdout + done.stderr):
        pytest.skip("the package index cannot be reached; installing needs it")
    assert done.returncode == 0, done.stderr
    done = run(*pip, "--no-index", "--no-deps", "inl-torch", "inl-cuda", env=env)
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_wheels_install_and_run(installed, wheels):
    dropped = ("PYTHONPATH", "INL_PLUGINS", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in dropped}

    def inl(*words):
        return run(installed / "bin" / "inl", *words, env=env, cwd=installed)

    def python(*words):
        return run(installed / "bin" / "python", *words, env=env, cwd=installed)

    plugins = inl("plugins").stdout
    assert re.search(r"^toy .* ready ", plugins, re.M), plugins
    assert re.search(r"^cuda .* (unavailable|ready|broken) ", plugins, re.M), plugins
    checked = inl("check", "toy:0", "--only", "backend/", "--only", "linear/")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    code = "from inl_cpu.library import *; print([left_out(open_library().library)])"
    found = run(installed / "bin" / "python", "-c", code, env=env, cwd=installed)
    assert found.stdout.strip() == "['']", "not every instruction set is in the wheel"
    assert re.search(r"^cpu .* ready .*native kernels", plugins, re.M), plugins
    assert not list(installed.glob("lib/python*/site-packages/torch"))
    words = ["The capital of France is", "--raw", "--max-tokens", "2"]
    for device in ("reference:0", "cpu:0"):
        answer = inl("generate", *words, "--device", device, "--temperature", "0")
        assert answer.stdout.strip() == "Paris.", answer.stderr
    plan = inl("plan", "--devices", "4x80GB")
    assert plan.returncode == 0, plan.stderr
    losses = ("-c", "import inl.nn.losses as losses; print(losses.mse_loss.__name__)")
    assert (
        "MissingPackage: inl-toolkit, which has inl.nn, is not installed"
        in python(*losses).stderr
    )
    # The command that the error names, as it is.
    line = python(*losses).stderr.rpartition("Try: ")[2].strip()
    assert f"install --find-links {wheels} inl-toolkit" in line
    done = run("sh", "-c", line, env=env, cwd=installed)
    assert done.returncode == 0, done.stderr
    assert python(*losses).stdout.strip() == "mse_loss"
