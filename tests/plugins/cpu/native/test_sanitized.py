"""The native tests with a library built with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
)
RACES = ("-fsanitize=thread", "-g1", "-O1")
# The sanitizers check copies themselves.
UNCHECKED = ("-U_FORTIFY_SOURCE",)
# The tests run at quick depth, with the scalar and the oldest vector kernels.
BASELINE = ("scalar", "avx2", "neon")
TESTS = (
    "linear",
    "experts",
    "rows",
    "pack",
    "decoders",
    "attention",
    "sample",
    "recurrent",
    "refusals",
)
THREADED = ("threads", "rows", "sample", "recurrent")
FRAMES = 1000


def runtime(builder, name):
    """Path of a sanitizer's runtime; skips if the compiler has none."""
    done = subprocess.run(
        [*builder.compiler(), f"-print-file-name={name}"],
        capture_output=True,
        text=True,
    )
    path = Path(done.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"{builder.compiler()[0]} has no {name}")
    return str(path)


def environment(builder, tmp_path_factory, name, flags):
    """Variables of a process that uses a library built with a sanitizer."""
    preload = runtime(builder, f"lib{name}.so")
    folder = tmp_path_factory.mktemp(name)
    flags = (*flags, *UNCHECKED)
    place = builder.build(folder / "libinl.so", flags, sets=BASELINE)
    return os.environ | {
        "INL_NATIVE_LIBRARY": str(place),
        "LD_PRELOAD": preload,
        # Python does not free all memory at exit.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


@pytest.fixture(scope="module")
def sanitized(builder, tmp_path_factory):
    return environment(builder, tmp_path_factory, "asan", SANITIZERS)


@pytest.fixture(scope="module")
def thread_sanitized(builder, tmp_path_factory):
    return environment(builder, tmp_path_factory, "tsan", RACES)


def outcome_of(names, env, *options):
    """The native tests of these names, in a process of their own."""
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in names]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-qxs", "-p", "no:cacheprovider",
         *options, *files],
        env=env, capture_output=True, text=True, cwd=here.parents[3],
    )  # fmt: skip


def run_python(code, env, *args):
    here = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-c", code, here, env["INL_NATIVE_LIBRARY"], *args],
        env=env, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_kernels_pass_the_sanitizers(sanitized):
    done = outcome_of(TESTS, sanitized | {"INL_TEST_DEPTH": "quick"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(900)
def test_mutated_frames_pass_the_sanitizers(sanitized):
    """Frames come from another process; what is accepted has its indices in range."""
    script = str(Path(__file__).parent / "frame_fuzz.py")
    done = subprocess.run(
        [sys.executable, script, sanitized["INL_NATIVE_LIBRARY"], str(FRAMES)],
        env=sanitized, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    accepted, refused = map(int, done.stdout.split())
    assert min(accepted, refused) > FRAMES // 10


@pytest.mark.timeout(900)
def test_the_pool_has_no_data_races(thread_sanitized):
    # NumPy's own threads are not instrumented, and look like races.
    env = thread_sanitized | {"OPENBLAS_NUM_THREADS": "1", "INL_TEST_DEPTH": "quick"}
    done = outcome_of(THREADED, env, "-k", "not scalar")
    output = done.stdout + done.stderr
    assert "ThreadSanitizer" not in output, output[-6000:]
    assert done.returncode == 0, output[-3000:]


OVERFLOW = """
import ctypes, sys; sys.path.insert(0, sys.argv[1])
from native_harness import *
native = Native(library(sys.argv[2]), 'scalar')
libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p
place = libc.malloc(60)
program = INSTRUCTION.pack(0, 0, 16, *[0] * 9, place, *[0] * 19, *[0] * 4)
native.lib.inl_run(native.pool, program, 1)
"""


def test_the_sanitizer_detects_an_overflow(sanitized):
    """ZERO on an array that is one element short."""
    done = run_python(OVERFLOW, sanitized)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


RACE = """
import sys; sys.path.insert(0, sys.argv[1])
from native_harness import *
native = Native(library(sys.argv[2]), 'scalar', 4)
x, y = np.ones((64, 8192), np.float32), np.zeros(8192, np.float32)
for _ in range(50):
    native.run(instruction(Op.COPY, (64, 8192, 8192, 0), (x, y)))
"""


def test_the_sanitizer_detects_a_race(thread_sanitized):
    """COPY of all rows to the same row: chunks write the same memory."""
    done = run_python(RACE, thread_sanitized)
    assert "data race" in done.stderr
    assert "copy_body" in done.stderr
