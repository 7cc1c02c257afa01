"""A wheel of a plugin for contract 1.1 works with this core."""

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

from inl.plugin import CONTRACT

SOURCE = Path(__file__).parents[2] / "data" / "plugin-contract-1.1"
INFO = "inl_old-1.1.0.dist-info"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: inl-old\nVersion: 1.1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "entry_points.txt": "[inl.v1]\nold = inl_old.plugin\n",
}
CHECKS = """
import json
from inl.device import Device
from inl.plugin import registry
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.target import Target

NAMES = ("backend", "runner/logits", "runner/feedback", "runner/masks",
         "engine/batched", "engine/prefix", "linear/")
results = {}
for device in ("old:0", "old_simple:0"):
    target = Target(Device(device), only=("linear",))
    for check in checks_of(target):
        if check.name.startswith(NAMES):
            results[f"{device} {check.name}"] = perform(check, {}).message
(row,) = [row for row in registry().plugins if row.name == "old"]
print(json.dumps([row._asdict(), results]))
"""


@pytest.fixture
def installed(tmp_path):
    """The folder in which pip has installed a wheel of the plugin."""
    wheel = tmp_path / "inl_old-1.1.0-py3-none-any.whl"
    package = SOURCE / "src"
    files = {
        path.relative_to(package).as_posix(): path.read_bytes()
        for path in sorted(package.rglob("*.py"))
    }
    files |= {f"{INFO}/{name}": text.encode() for name, text in METADATA.items()}
    record = [
        f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{INFO}/RECORD", "\n".join([*record, f"{INFO}/RECORD,,"]))
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index",
         "--no-compile", "--target", target, wheel],
        check=True,
        timeout=300,
    )  # fmt: skip
    return target


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_a_plugin_for_contract_1_1_still_works(installed, tmp_path):
    assert CONTRACT[0] == 1
    assert CONTRACT >= (1, 1)
    path = os.pathsep.join([str(installed), *filter(None, sys.path)])
    variables = {"PYTHONPATH": path, "INL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    row, results = json.loads(done.stdout)
    assert (row["distribution"], row["version"]) == ("inl-old", "1.1.0")
    assert row["status"] == "ready"
    assert "kernels for old_simple" in row["detail"]
    assert len(results) > 40
    assert {name: text for name, text in results.items() if text} == {}
