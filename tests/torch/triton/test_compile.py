"""Compilation of all Triton kernels for several chips: no spills, no TF32."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SHARED = {
    "cuda:80": 166912, "cuda:90": 232448, "cuda:100": 232448, "hip:gfx90a": 65536,
    "hip:gfx942": 65536, "hip:gfx950": 163840, "hip:gfx1100": 65536,
}  # fmt: skip
"""Most shared memory of a program in bytes, by chip."""

STACK = 40
"""Bytes of stack that are acceptable: a few scalars, or the slow path of a cosine."""

MORE_STACK = {"attend_tiles": 80}
"""Kernels that are faster with small spills, as measured: tiles of a group of three
heads of 128."""

WIDE = {"cuda:90": ["float32", "bfloat16"], "hip:gfx942": ["float32", "bfloat16"]}
"""Chips for which float32 is compiled too."""

BOTH_SIZES = ("cuda:80", "cuda:90")
"""Chips for which heads of 128 are compiled too."""

SPILLING = {
    "hip:gfx1100": {"attend", "attend_tiles", "rope_attend"},
}
"""Kernels whose tiles are too large and slow to compile for a chip without a plugin."""

SECONDS = 60
"""Most seconds to compile one kernel, on a slow processor."""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles not"
    ),
]


def compiled(target, *words):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), target, *words],
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def faults(rows, target):
    for row in rows:
        name = f"{row['kernel']} of {row['dtype']} x {row['dim']} for {target}"
        known = row["kernel"] in SPILLING.get(target, ())
        if row["spills"] > MORE_STACK.get(row["kernel"], STACK) and not known:
            yield f"{name} spills {row['spills']} bytes"
        if row["shared"] > SHARED[target]:
            yield f"{name} takes {row['shared']} bytes of shared memory"
        if row["dtype"] == "float32" and row["tf32"]:
            yield f"{name} multiplies in TF32"
        if row["seconds"] > SECONDS and not known:
            yield f"{name} took {row['seconds']} s to compile"


@pytest.mark.parametrize("target", SHARED)
def test_every_kernel_compiles_and_fits(target):
    dims = ["64", "128"] if target in BOTH_SIZES else ["64"]
    dtypes = WIDE.get(target, ["bfloat16"])
    rows = compiled(target, "--dims", *dims, "--dtypes", *dtypes)
    assert len({row["kernel"] for row in rows}) >= 26
    assert not list(faults(rows, target))


def test_faults_are_found():
    row = {"kernel": "x", "dtype": "float32", "dim": 64, "spills": 48, "shared": 10**6}
    rows = [{**row, "tf32": True, "seconds": 99}]
    assert len(list(faults(rows, "cuda:80"))) == 4
