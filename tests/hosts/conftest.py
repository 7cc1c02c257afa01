"""Fixtures: the native library for other systems, and an emulated Python on ARM."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib

import pytest

from cross_hosts import HOSTS, PACKAGE, PLACE, ROOT


def builder():
    """The module ``build_native``."""
    spec = importlib.util.spec_from_file_location(
        "native", PACKAGE / "src" / "inl_cpu" / "build_native.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library():
    """Return the path of the library for a host; built if a source is newer."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the package ziglang is not installed: make test-hosts")
    sources = [
        *PACKAGE.glob("*.py"),
        *(PACKAGE / "src/inl_cpu/native").rglob("*.[ch]*"),
    ]
    newest = max(path.stat().st_mtime for path in sources)

    def built(name):
        host = HOSTS[name]
        path = PLACE / name / host.name
        if not path.exists() or path.stat().st_mtime < newest:
            path.parent.mkdir(parents=True, exist_ok=True)
            compiler = f"{sys.executable} -m ziglang c++ -target {host.target}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CXX", compiler)
                patch.setenv("ZIG_GLOBAL_CACHE_DIR", str(PLACE / "zig"))
                patch.setenv("ZIG_LOCAL_CACHE_DIR", str(PLACE / "zig"))
                builder().build(path)
        return path

    return built


@pytest.fixture(scope="session")
def emulated(library):
    """Run the emulated Python with arguments; it finds INL, and INL its library."""
    emulator = PLACE / "emulator/usr/bin/qemu-aarch64-static"
    site = PLACE / "site"
    if not emulator.exists() or not site.exists():
        pytest.skip(f"no emulator in {PLACE}: make test-hosts")
    native = library("linux-arm64")
    describe_plugin(site)
    paths = (site, ROOT / "core/src", PACKAGE / "src", ROOT)
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "INL_NATIVE_LIBRARY": str(native),
        "INL_THREADS": "2",
        "INL_TEST_DEPTH": "quick",
    }

    def run(*arguments):
        root = PLACE / "arm64"
        return subprocess.run(
            [emulator, "-L", root, root / "usr/bin/python3.11", *arguments],
            capture_output=True, text=True, cwd=ROOT, env=os.environ | settings,
        )  # fmt: skip

    return run


def describe_plugin(site):
    """Write what makes the plugin in the source tree known, as its wheel would."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    folder = site / f"inl_cpu-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    text = "Metadata-Version: 2.1\nName: inl-cpu\nVersion: {version}\n"
    (folder / "METADATA").write_text(text.format_map(project))
    ((name, module),) = project["entry-points"]["inl.v2"].items()
    (folder / "entry_points.txt").write_text(f"[inl.v2]\n{name} = {module}\n")
