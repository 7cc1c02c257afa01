"""Compilation of the Triton kernels for Intel GPUs: `make test-intel-compiler`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".intel"
SCRIPT = Path(__file__).with_name("compile_xpu.py")
SHARED = {"pvc": 128 << 10, "bmg": 128 << 10, "lnl": 128 << 10, "dg2-g10": 64 << 10}
"""Most local memory of a work group in bytes, by GPU, from Intel's manuals."""

SECONDS = 1800

COMPILED = (("pvc", "bmg", "lnl"), ("dg2-g10",))
"""GPUs for which all kernels are compiled; those of a group get the same SPIR-V."""

MAY_SPILL = {
    "_rope_write": 25, "attend": 60, "attend_tiles": 90, "blocks_product": 10,
    "lora_expand": 120, "place_slots": 120, "search_pass": 20,
}  # fmt: skip
"""Kernels that spill -> most of the 128 registers of a thread: attention, whose warps
keep all keys of a tile; adapters and blocks of gradients, of 32 warps already; the
filters of samplers, which these GPUs leave to torch; and two that spill none with 256:
the sorting of experts' slots, and rotated keys written to a cache."""

NARROW = "dg2-g10"
LEFT_TO_TORCH = {
    "attend", "attend_tiles", "blocks_product", "columns_product", "fixed_product",
    "lora_expand", "lora_shrink", "place_slots", "rope_attend", "row_product",
    "search_pass", "tile_product", "_rope_table",
}  # fmt: skip
"""Kernels of ops that GPUs with registers of 32 bytes leave to torch (``WIDE_ONLY``),
of filters (left to torch on all Intel GPUs) and of block-sparse matrices (NVIDIA's and
AMD's only): they spill hundreds there, or need float64."""

RECOMPILED = 31
"""Spilled registers of 32 bytes above which Intel's driver of Triton compiles again
with 256 for each thread."""

NARROW_MAY_SPILL = {"_write": 10, "combine": 25, "conv_state": 10, "delta_steps": 25}
"""Likewise, of those that such GPUs use."""

needs_compiler = pytest.mark.skipif(
    not (TOOLS / "complete").exists(), reason=f"no {TOOLS}: make test-intel-compiler"
)


def compiled(*words):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(TOOLS), *words],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def faults(rows):
    """Yield a sentence for each kernel that does not compile or fit."""
    for row in rows:
        device = row["device"]
        name = f"{row['kernel']} for {device}"
        if device == NARROW and row["kernel"] in LEFT_TO_TORCH:
            continue
        if row["error"]:
            yield f"{name} does not compile: {row['error']}"
            continue
        if row["shared"] > SHARED[device]:
            yield f"{name} takes {row['shared']} bytes of local memory"
        spills, most = row["spills"], MAY_SPILL.get(row["kernel"], 0)
        if device == NARROW:
            spills = row["large"] if spills > RECOMPILED else spills
            most = NARROW_MAY_SPILL.get(row["kernel"], 0)
        if spills > most:
            yield f"{name} spills {spills} registers"


@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("devices", COMPILED)
def test_every_kernel_compiles_for_intel(devices):
    rows = compiled(*devices, "--dtypes", "bfloat16", "--dims", "64")
    assert len({(row["kernel"], row["device"]) for row in rows}) >= 35 * len(devices)
    assert not list(faults(rows))


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("spill", "spilling for dg2-g10 spills"),
        ("float64", "doubling for dg2-g10 does not compile: .*Double type"),
        ("operation", "foreign for dg2-g10 does not compile: .*no_such_operation"),
    ],
)
def test_a_planted_kernel_is_reported(plant, fault):
    (found,) = faults(compiled("dg2-g10", "--plant", plant))
    assert re.match(fault, found, re.DOTALL), found


ROW = {
    "device": "pvc",
    "kernel": "_norm",
    "shared": 0,
    "spills": 0,
    "large": 0,
    "error": "",
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spills": 1}, "_norm for pvc spills 1 registers"),
        ({"spills": 60, "kernel": "attend"}, None),
        ({"shared": 1 << 20}, "_norm for pvc takes 1048576 bytes of local memory"),
        ({"error": "why"}, "_norm for pvc does not compile: why"),
        ({"device": NARROW, "kernel": "attend", "spills": 700, "large": 600}, None),
        ({"device": NARROW, "spills": 83, "large": 0}, None),
        (
            {"device": NARROW, "spills": 83, "large": 1},
            "_norm for dg2-g10 spills 1 registers",
        ),
        ({"device": NARROW, "spills": 31}, "_norm for dg2-g10 spills 31 registers"),
    ],
)
def test_faults_are_reported_by_name(change, fault):
    assert list(faults([ROW | change])) == ([fault] if fault else [])
