"""Wheels of plugins for contract 1.1 and 1.2 work with this core, by its adapter."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from depth import mostly_full

DATA = Path(__file__).parents[2] / "data"
NAMES = {"1.1": "old", "1.2": "vendor"}
DEVICES = {
    "1.1": ("old:0", "old_simple:0", "old_listed:0"),
    "1.2": ("vendor:0", "vendor_simple:0"),
}
SINCE_1_2 = {
    "activate", "causal_conv", "chunk_rows", "delta_rule", "expand_rows", "group_route",
    "head_linear", "join_lanes", "layer_norm", "sink_attention", "temper_queries",
    "verify",
}  # fmt: skip
SINCE_2_0 = {
    "biased_attention", "full_attention", "pool", "span_attention", "unit_rows",
}  # fmt: skip
SINCE_2_1 = {"accepted_rows", "index_topk", "own_slots", "sparse_attention"}
LEFT_OUT = {
    "old:0": set(), "old_simple:0": set(),
    "old_listed:0": SINCE_1_2 | SINCE_2_0 | SINCE_2_1 | {"ssm_scan", "xielu"},
    "vendor:0": SINCE_2_0 | SINCE_2_1, "vendor_simple:0": SINCE_2_0 | SINCE_2_1,
}  # fmt: skip
"""Ops without a kernel: some have those of whatever ops the core lists. The body of
``ssm_scan`` and ``xielu`` call one of contract 1.2."""
CHECKS = """
import json, sys
import numpy as np
from inl.device import Device
from inl.engine.core import EngineCore
from inl.models.llama import MODEL
from inl.plugin import make_backend, registry
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.testing.conformance import check_all
from inl.testing.optional_ops import left_out
from inl.testing.target import Target
from inl.testing.tiny import MemoryCheckpoint, local_runner, plain_logits, tiny_llama

name, *devices = sys.argv[1:]
model = tiny_llama(np.random.default_rng(0))
want = [5, 7, 11]
while len(want) < 11:
    want.append(int(plain_logits(*model, want)[-1].argmax()))
found = {}
for device in devices:
    target = Target(Device(device))
    results = check_all(target)
    backend = make_backend(device)
    limits = Limits(slots=5, blocks=(20,), block_size=8, max_blocks_per_seq=6, vocab=96)
    limits = Limits(**{
        **{field: getattr(limits, field) for field in limits.__slots__},
        "buckets": tuple(backend.buckets(limits)),
    })
    core = EngineCore(local_runner(backend, MODEL, MemoryCheckpoint(*model), limits))
    core.add(request := Request(want[:3], max_tokens=8))
    while core.has_work:
        assert not [event.error for event in core.step() if event.error]
    found[device] = {
        "checks": len(results),
        "failed": {r.name: r.message for r in results if r.status == "failed"},
        "left out": left_out(target),
        "answers": list(request.output_ids) == want[3:],
    }
(row,) = [row for row in registry().plugins if row.name == name]
print(json.dumps([row._asdict(), found]))
"""


@pytest.fixture
def installed(tmp_path):
    """Build a wheel of a fixture, install it by pip, and return the folder."""

    def install(version):
        name, module = f"inl-{NAMES[version]}", f"inl_{NAMES[version]}"
        info = f"{module}-{version}.0.dist-info"
        package = DATA / f"plugin-contract-{version}" / "src"
        files = {
            path.relative_to(package).as_posix(): path.read_bytes()
            for path in sorted(package.rglob("*.py"))
        }
        points = f"[inl.v1]\n{NAMES[version]} = {module}.plugin\n"
        about = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "entry_points.txt": points,
        }
        files |= {f"{info}/{name}": text.encode() for name, text in about.items()}
        record = [
            f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()
        ]
        wheel = tmp_path / f"{module}-{version}.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
            archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]))
        target = tmp_path / "site"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index",
             "--no-compile", "--target", target, wheel],
            check=True,
            timeout=300,
        )  # fmt: skip
        return target

    return install


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("version", mostly_full(["1.2", "1.1"], 0))
def test_a_plugin_of_contract_1_works_unchanged(installed, tmp_path, version):
    path = os.pathsep.join([str(installed(version)), *filter(None, sys.path)])
    variables = {"PYTHONPATH": path, "INL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, NAMES[version], *DEVICES[version]],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    row, found = json.loads(done.stdout)
    assert (row["distribution"], row["version"], row["status"]) == (
        f"inl-{NAMES[version]}", f"{version}.0", "ready",
    )  # fmt: skip
    assert row["detail"].startswith(f"contract {version}, through the adapter; ")
    assert f"kernels for {NAMES[version]}_simple" in row["detail"]
    for device, results in found.items():
        assert results["failed"] == {}, device
        assert results["checks"] > 600
        assert results["answers"], device
        left_out = LEFT_OUT[device]
        assert set(results["left out"]) == left_out, device
