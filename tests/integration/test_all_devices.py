"""`inl devices` with every plugin installed: a line for each type, and no framework."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

LISTING = """
import sys
from inl.cli.main import main
assert main(["devices"]) == 0
print(*sys.modules)
"""
FRAMEWORKS = {"torch", "jax", "triton", "onnx", "onnxruntime", "openvino", "numpy"}
TYPES = ("cpu", "cuda", "directml", "rocm", "tpu", "xpu")
MOST_MODULES = 450
"""Imported in less than 0.2 s of processor time."""


@pytest.fixture(scope="module")
def listed():
    """Lines of the command, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", LISTING], capture_output=True, text=True, check=True
    )
    *lines, modules = done.stdout.splitlines()
    return lines, set(modules.split())


def test_each_type_has_one_line(listed):
    assert len(entry_points(group="inl.v2")) >= len(TYPES)
    # GPUs that are found have a line each.
    kinds = {line.split()[0].partition(":")[0] for line in listed[0]}
    assert kinds >= {*TYPES, "reference"}
    absent = [line for line in listed[0] if line.split()[1] == "unavailable"]
    assert len({line.split()[0] for line in absent}) == len(absent)
    assert all(len(line.split()) > 4 for line in absent)


def test_probes_import_few_modules_and_no_framework(listed):
    assert len(listed[1]) < MOST_MODULES
    assert {"inl_rocm.probe", "inl_intel.probe", "inl_tpu.probe"} <= listed[1]
    assert listed[1].isdisjoint(FRAMEWORKS)
