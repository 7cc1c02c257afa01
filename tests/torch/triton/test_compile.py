"""Compilation of all Triton kernels for several chips: no spills, no TF32."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from depth import drawn, scaled

SCRIPT = Path(__file__).with_name("compile_kernels.py")
LDS = 64 << 10
SHARED = {
    "cuda:80": 166912, "cuda:90": 232448, "cuda:100": 232448, "cuda:120": 99 << 10,
    "hip:gfx90a": LDS, "hip:gfx942": LDS, "hip:gfx950": 160 << 10, "hip:gfx1100": LDS,
    "hip:gfx1201": LDS,
}  # fmt: skip
"""Most shared memory of a program in bytes, by chip, from the vendors' manuals."""

STACK = 40
"""Bytes of stack that are acceptable: a few scalars, or the slow path of a cosine."""

MORE_STACK = {"attend_tiles": 88, "attend_chosen": 200, "attend_wide": 168}
"""Kernels that are faster with small spills, as measured: tiles of a group of three
heads of 128. And latents of 576 lanes, which spill on AMD's chips of 32 lanes only, or
in tiles of 64 heads."""

SMALL_STACK = MORE_STACK | {"packed_tile": 184, "ssm_rows": 80}
"""Likewise on the small Blackwell chips, for which kernels were compiled and never run:
their assembler gives these more registers to spill."""

WIDE = {
    "cuda:90": ["float32", "bfloat16"],
    "hip:gfx942": scaled(["bfloat16"], ["bfloat16"], ["float32", "bfloat16"]),
}
"""Chips for which float32 is compiled too."""

PLAIN = ["64"], ["--skip-packed"]
"""Sizes of heads for which they are compiled for float32 at other than long depth, and
what is left out."""

BOTH_SIZES = ("cuda:80", "cuda:90")
"""Chips for which heads of 128 are compiled too."""

PACKED = {"packed_row", "packed_rows", "unpack", "packed_slots", "packed_tile"}
"""Kernels of packed weights, which no backend uses on AMD's chips. They may spill."""

LANES = ("hip:gfx942", "hip:gfx1100")
"""One chip of each number of lanes."""

SKIP_PACKED = ("hip:gfx90a", "hip:gfx950", "hip:gfx1201", *scaled(LANES, LANES, ()))
"""Chips for which they are not compiled."""

MATRIX = {"gfx9": ["v_mfma"], "gfx1": ["v_wmma"]}
"""Start of an architecture's name -> its matrix instructions, in bfloat16."""

PRODUCTS = {
    "attend",
    "attend_sequences",
    "attend_tiles",
    "rope_attend",
    "tile_product",
    "packed_tile",
}
"""Kernels that must use them."""

SEARCH_BYTES = 1 << 10
"""Most shared memory of the search for a sampling threshold. Its accumulators belong to
threads: with as many threads as accumulators nothing else is exchanged."""

LONG = ("cuda:80", "cuda:100", "cuda:120", "hip:gfx90a", "hip:gfx950", "hip:gfx1201")
"""Chips of ``make test-long``, beside those that other runs compile for."""

UNDRAWN = tuple({*LANES} - {drawn(LANES)})
"""A run compiles all kernels for one of the two."""

SECONDS = 60
"""Most seconds of processors to compile one kernel, on a slow one."""

PATIENCE = 1700
"""Seconds for all kernels of a chip; a few minutes on a machine without other work."""

pytestmark = [
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles not"
    ),
]


def targets(kind="", long=LONG):
    """Chips of a vendor, those of ``long`` at long depth only."""
    return [
        pytest.param(name, marks=pytest.mark.long if name in long else ())
        for name in SHARED
        if kind in name
    ]


def compiled(target, *words):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), target, *words],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def faults(rows, target):
    amd = target.startswith("hip:")
    for row in rows:
        name = f"{row['kernel']} of {row['dtype']} x {row['dim']} for {target}"
        if row["spills"] > most_spills(row["kernel"], target):
            yield f"{name} spills {row['spills']} {'registers' if amd else 'bytes'}"
        if row["shared"] > SHARED[target]:
            yield f"{name} takes {row['shared']} bytes of shared memory"
        if row["kernel"] == "search_pass" and row["shared"] > SEARCH_BYTES:
            yield f"{name} exchanges {row['shared']} bytes between threads"
        if amd and row["unordered"]:
            yield f"{name} publishes stores that may not be complete"
        if row["dtype"] == "float32" and row["tf32"]:
            yield f"{name} multiplies in TF32"
        if row["seconds"] > SECONDS:
            yield f"{name} took {row['seconds']} s to compile"
        half = row["dtype"] != "float32"
        if amd and half and row["kernel"] in PRODUCTS:
            expected = MATRIX[target.removeprefix("hip:")[:4]]
            if row["matrix"] != expected:
                yield f"{name} uses {row['matrix']}, not {expected}"


def most_spills(kernel, target):
    """Bytes of stack on NVIDIA's chips, registers on AMD's."""
    if target.startswith("hip:"):
        return STACK if kernel in PACKED else 0
    known = SMALL_STACK if target == "cuda:120" else MORE_STACK
    return known.get(kernel, STACK)


@pytest.mark.parametrize("target", targets(long=(*LONG, *UNDRAWN)))
def test_every_kernel_compiles_and_fits(target):
    dims = ["64", "128"] if target in BOTH_SIZES else ["64"]
    words = ["--skip-packed"] if target in SKIP_PACKED else []
    rows = compiled(target, "--dims", *dims, "--dtypes", "bfloat16", *words)
    assert len({row["kernel"] for row in rows} - PACKED) >= 23
    if "float32" in WIDE.get(target, []):
        dims, words = scaled(PLAIN, PLAIN, (dims, words))
        rows += compiled(target, "--dims", *dims, "--dtypes", "float32", *words)
    assert not list(faults(rows, target))


# The narrow chip has the fewest registers.
@pytest.mark.long
@pytest.mark.parametrize("target", targets("hip", (*LONG, "hip:gfx942")))
def test_attention_of_large_heads_fits(target):
    dtypes = WIDE.get(target, ["bfloat16"])
    rows = compiled(target, "--attention", "--dims", "128", "--dtypes", *dtypes)
    assert {row["kernel"] for row in rows} >= {"attend", "attend_tiles", "rope_attend"}
    assert not list(faults(rows, target))


def test_faults_are_found():
    row = {"kernel": "x", "dtype": "float32", "dim": 64, "spills": 48, "shared": 10**6}
    rows = [{**row, "tf32": True, "seconds": 99}]
    assert len(list(faults(rows, "cuda:80"))) == 4


@pytest.mark.parametrize(
    ("target", "change", "fault"),
    [
        ("hip:gfx942", {"spills": 1}, "spills 1 registers"),
        ("hip:gfx942", {"shared": LDS + 1}, "bytes of shared memory"),
        ("hip:gfx942", {"matrix": []}, "uses [], not ['v_mfma']"),
        ("hip:gfx1201", {"matrix": ["v_mfma"]}, "not ['v_wmma']"),
        ("hip:gfx942", {"kernel": "search_pass", "shared": 16384}, "exchanges 16384"),
        ("hip:gfx942", {"unordered": True}, "publishes stores that may not be"),
        ("hip:gfx942", {}, None),
    ],
)
def test_faults_of_amd_are_found(target, change, fault):
    row = {
        "kernel": "attend", "dtype": "bfloat16", "dim": 64, "spills": 0, "shared": 0,
        "tf32": False, "seconds": 1, "matrix": ["v_mfma"], "unordered": False,
    }  # fmt: skip
    found = list(faults([row | change], target))
    assert (len(found) == 1 and fault in found[0]) if fault else not found


GFX9 = ("buffer_store_dword v1", "s_waitcnt vmcnt(0)", "s_barrier", "global_atomic_add")
GFX11 = ("global_store_b32", "s_waitcnt_vscnt null, 0x0", "s_barrier", GFX9[3])
GFX12 = (
    "global_store_b32", "s_wait_storecnt 0x0", "s_barrier_signal -1",
    "s_barrier_wait -1", GFX9[3],
)  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        (GFX9, True), (GFX11, True), (GFX12, True),
        ((GFX9[1], GFX9[0], *GFX9[2:]), False),
        ((GFX9[0], GFX9[2], GFX9[1], GFX9[3]), False),
        ((GFX9[0], GFX9[3]), True), ((GFX9[0], GFX9[2]), True),
    ],
    ids=["gfx9", "gfx11", "gfx12", "too early", "too late", "one wave", "no atomic"],
)  # fmt: skip
def test_stores_are_complete_at_the_barrier(lines, right):
    from compile_kernels import publishes_stores

    assert publishes_stores("\n".join(lines)) == right
