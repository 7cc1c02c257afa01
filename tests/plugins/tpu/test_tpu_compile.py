"""The Pallas kernels compiled by the real TPU compiler, for chips that are not here."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from depth import DEPTH, mostly_drawn

FOLDER = Path(__file__).parent
BENCH = FOLDER.parents[2] / "bench"
CHIPS = {
    "v5e:2x2": "TPU v5 lite",
    "v5p:2x2x1": "TPU v5",
    "v6e:2x2": "TPU v6 lite",
    "tpu7x:2x2x1": "TPU7x",
}
VMEM = 64 << 20
"""Of the smallest of these chips."""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install 'inl-tpu[compiler]'",
    ),
    pytest.mark.timeout(1800),
]


def compiled(*arguments, worker=FOLDER / "aot_worker.py", status=0):
    done = subprocess.run(
        [sys.executable, str(worker), *arguments],
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("topology", CHIPS)
def test_paged_attention_compiles(topology, capsys):
    found = compiled(topology, "")
    with capsys.disabled():
        print(f"\n{found}")
    assert found["device"] == CHIPS[topology]
    assert len(found["results"]) == 4
    for name, temporary_bytes in found["results"].items():
        assert isinstance(temporary_bytes, int), f"{name}: {temporary_bytes}"


@pytest.mark.long
def test_attention_with_too_much_vmem_is_refused_by_name():
    found = compiled("v5e:2x2", "vmem")
    reason = found["results"]["planted"]
    assert "ragged_paged_attention" in str(reason)
    assert "vmem" in str(reason).lower()


@pytest.mark.full
@pytest.mark.parametrize("topology", mostly_drawn(CHIPS))
def test_whole_steps_compile_in_place(capsys, topology):
    """Two layers of the default model: 32 decoding rows, one step and 8 repeated ones,
    and a prompt.
    """
    steps = ("32x1", "32x8", "512x1")
    found = compiled(topology, "135M", *steps, worker=FOLDER / "aot_steps.py")
    with capsys.disabled():
        print(f"\n{topology} {found}")
    assert tuple(found) == steps
    for facts in found.values():
        assert facts["kernel"] == "attention/pallas"
        assert facts["attentions"] == 2
        assert facts["cache copies"] == facts["callbacks"] == 0
        assert facts["aliased bytes"] >= facts["state bytes"]


OWN_CODE = "decode up"
"""Launches whose code depends on the chip: conversions of float8, searched sizes."""

KERNELS = {
    "packed_matmul", "dense_matmul", "gated_matmul", "ragged_paged_attention",
    "write_kv", "rope_q", "rope_k", "expert_linear", "reduce_add_norm", "inl_dynamics",
    "transpose_jvp_inl_dynamics_backward__", "block_sparse_matmul",
    "block_sparse_attention",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("topology", CHIPS)
def test_every_kernel_compiles(topology):
    """No kernel is refused by Mosaic or needs more than its share of VMEM."""
    worker = BENCH / "tpu_roofline.py"
    every = DEPTH == "long"  # a minute for each chip
    only = () if every else ("--only", OWN_CODE)
    rows = compiled(topology, "--json", "--uncounted", *only, worker=worker)
    assert {row["kernel"] for row in rows} == (KERNELS if every else {"packed_matmul"})
    assert [row for row in rows if row["problem"]] == []


def check_counts(topology, *arguments):
    """No kernel spills too often; returns the shares of the limits by name."""
    rows = compiled(topology, "--json", *arguments, worker=BENCH / "tpu_roofline.py")
    for row in rows:
        assert not row["problem"], row
        assert 0 < row["vmem"] <= VMEM, row
        assert row["bundles"] > 0, row
        assert row["cycles"] == 0 or row["cycles"] >= row["bundles"], row
    return {row["name"]: row for row in rows}


@pytest.mark.full
def test_decoding_reaches_its_share_of_the_bandwidth():
    """By bundles, on a v6e: attention, cache writes and products of the 8B shape."""
    shares = check_counts("v6e:2x2", "--only", "8B decode")
    for name, kind, least in SHARES:
        if name in shares:
            assert shares[name][f"{kind}_share"] >= least, shares[name]
    assert sum(name in shares for name, *_ in SHARES) == 8


@pytest.mark.long
@pytest.mark.parametrize("topology", CHIPS)
def test_no_kernel_spills_too_often(topology):
    shares = check_counts(topology)
    assert len(shares) > 15
    if topology.startswith("v6e"):
        for name, kind, least in SHARES:
            assert shares[name][f"{kind}_share"] >= least, shares[name]


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "limit", "least"),
    [("prefill", "FLOPs", 0.7), ("decode", "bandwidth", 0.8)],
)
def test_whole_steps_reach_their_share_of_the_limits(step, limit, least):
    """The 8B shape on a v6e, by XLA's estimates and bundles of the Pallas kernels."""
    done = subprocess.run(
        [
            sys.executable,
            str(BENCH / "tpu_step_roofline.py"),
            "v6e:2x2",
            "--steps",
            step,
        ],
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.search(rf"([\d.]+) of {limit}", done.stdout)[1]) >= least


SHARES = [
    ("8B decode up int8", "bytes", 0.8),
    ("8B decode down int8", "bytes", 0.8),
    ("8B decode up int4", "bytes", 0.8),
    ("8B decode up int4 offsets", "bytes", 0.7),
    ("8B decode up float8", "bytes", 0.95),
    ("8B decode attention", "bytes", 0.95),
    ("8B decode attention int8", "bytes", 0.7),
    ("8B decode write", "bytes", 0.4),
    ("8B prefill attention", "flops", 0.35),
    ("8B prefill up int8", "flops", 0.7),
    ("8B prefill down int8", "flops", 0.7),
    ("8B prefill gate and up", "flops", 0.9),
    ("8x7B decode experts", "bytes", 0.8),
]
"""Name, limit and the least share of it on a v6e, by counts of bundles."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        ("vmem", "planted_vmem.*vmem"),
        ("mosaic", "planted_mosaic.*sort"),
        ("spills", "planted_spills.*spills"),
    ],
)
def test_a_planted_failure_is_named(plant, reason):
    worker = BENCH / "tpu_roofline.py"
    (row,) = compiled("v6e:2x2", "--plant", plant, "--json", worker=worker, status=1)
    assert re.search(reason, f"{row['kernel']} {row['problem']}", re.DOTALL), row
