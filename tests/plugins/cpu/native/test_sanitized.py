"""The native tests with a library built with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
)
TESTS = ("linear", "rows", "pack", "attention", "sample", "refusals")


def runtime(builder, name):
    """Path of a sanitizer's runtime; skips if the compiler has none."""
    done = subprocess.run(
        [builder.compiler(), f"-print-file-name={name}"], capture_output=True, text=True
    )
    path = Path(done.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"{builder.compiler()} has no {name}")
    return str(path)


@pytest.fixture(scope="module")
def sanitized(builder, tmp_path_factory):
    preload = runtime(builder, "libasan.so")
    place = builder.build(
        tmp_path_factory.mktemp("sanitized") / "libinl.so", SANITIZERS
    )
    environment = {
        "INL_NATIVE_LIBRARY": str(place),
        "LD_PRELOAD": preload,
        # Python does not free all memory at exit.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return os.environ | environment


@pytest.mark.timeout(900)
def test_kernels_pass_the_sanitizers(sanitized):
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qxs", "-p", "no:cacheprovider", *files],
        env=sanitized, capture_output=True, text=True, cwd=here.parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_sanitizer_detects_an_overflow(sanitized):
    """ZERO on an array that is one element short."""
    code = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[1])\n"
        "from native_harness import *\n"
        "native = Native(library(sys.argv[2]), 'scalar')\n"
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "place = libc.malloc(60)\n"
        "program = INSTRUCTION.pack(0, 0, 16, *[0] * 9, place, *[0] * 19, *[0] * 4)\n"
        "native.lib.inl_run(native.pool, program, 1)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, sanitized["INL_NATIVE_LIBRARY"]],
        env=sanitized, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
