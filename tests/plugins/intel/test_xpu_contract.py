"""``inl check xpu:0`` on the simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_xpu import DTYPES

from depth import scaled

FOLDER = str(Path(__file__).parent)

CHECK = """
import importlib.metadata, sys
# An installed inl-intel would serve the device first.
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
from inl.cli.main import main
sys.exit(main(["check", "xpu:0", "--json", *sys.argv[1:]]))
"""

CHECKS = (
    "backend/", "runner/", "blocks/", "engine/", "feature/", "attention/", "linear/",
    "rope/", "rope_table/",
)  # fmt: skip
"""All but kernels of tests/torch/test_ops.py, which long depth has too."""


@pytest.mark.full
def test_the_simulated_device_passes_the_checks():
    names = scaled((), CHECKS, ())
    dtypes = scaled("", "bfloat16", "bfloat16,float16,float32")
    paths = os.pathsep.join((FOLDER, os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *(x for name in names for x in ("--only", name))],
        capture_output=True, text=True, timeout=580,
        env=os.environ
        | {"INL_PLUGINS": "simulated_xpu", "PYTHONPATH": paths, DTYPES: dtypes},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    card = json.loads(done.stdout)
    assert card["failures"] == []
    assert card["ops"]["rope_table"]["kernels"] == ["eager", "eager_fixed_point"]
