"""NEON kernels, cross-compiled and run in an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MAIN = Path(__file__).parent / "neon_main.cpp"


@pytest.fixture(scope="module")
def program(builder, tmp_path_factory):
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on the path")
    place = tmp_path_factory.mktemp("neon") / "main"
    sources = [str(path) for path in sorted(builder.SOURCES.rglob("*.cpp"))]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-static", "-pthread"]
    include = f"-I{builder.SOURCES}"
    command = [COMPILER, *flags, include, str(MAIN), *sources, "-o", str(place)]
    subprocess.run(command, check=True)
    return place


def test_neon_matches_scalar_kernels(program):
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" ok ") == len(done.stdout.splitlines()) == 19


def test_a_processor_without_dot_products_is_detected(program):
    command = [EMULATOR, "-cpu", "cortex-a57", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "no NEON with dot products\n")
