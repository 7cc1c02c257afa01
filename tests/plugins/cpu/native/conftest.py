"""Fixtures: the native library, in every instruction set of this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from native_harness import Native, library

from inl_cpu.abi import ISAS
from inl_cpu.library import left_out

PACKAGE = Path(__file__).parents[4] / "plugins" / "inl-cpu"
BUILT = PACKAGE / "src" / "inl_cpu" / "native" / "libinl.so"
LIBRARY = "INL_NATIVE_LIBRARY"
"""Environment variable: path of another library to test."""


QUICK = ("scalar", "neon" if platform.machine() == "aarch64" else "avx2")
"""Instruction sets of the quick test depth."""


@pytest.fixture(scope="session")
def builder():
    """The module ``build_native``; skips without a C++ compiler."""
    spec = importlib.util.spec_from_file_location(
        "build_native", PACKAGE / "src" / "inl_cpu" / "build_native.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if shutil.which(module.compiler()[0]) is None:
        pytest.skip(f"no C++ compiler: {module.compiler()[0]} is not on the path")
    return module


@pytest.fixture(scope="session")
def newest_source():
    """Time at which a source was last written."""
    sources = (PACKAGE / "src" / "inl_cpu" / "native").rglob("*.[ch]*")
    return max(source.stat().st_mtime for source in sources)


@pytest.fixture(scope="session")
def place(request, newest_source, tmp_path_factory):
    """Path of the library, built if it is missing, older than a source, or made for
    this processor only."""
    named = os.environ.get(LIBRARY)
    if named:
        return Path(named)
    current = BUILT.exists() and BUILT.stat().st_mtime >= newest_source
    if current and not left_out(library(BUILT)):
        return BUILT
    builder = request.getfixturevalue("builder")
    return builder.build(tmp_path_factory.mktemp("native") / "libinl.so")


@pytest.fixture(scope="session")
def lib(place):
    return library(place)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(i, marks=() if i in QUICK else pytest.mark.full) for i in ISAS
    ],
)
def native(lib, request):
    """A pool of two threads, for each instruction set."""
    if not lib.inl_can_run(ISAS.index(request.param)):
        pytest.skip(f"this processor does not run {request.param}")
    opened = Native(lib, request.param, threads=2)
    yield opened
    opened.close()


@pytest.fixture
def rng():
    return np.random.default_rng(5)
