"""The torch fallback passes ``inl check`` with INL_CPU=torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")


CHECKS = ("backend/", "runner/", "blocks/", "engine/", "feature/", "linear/")
"""All but those of other kernels: tests/torch/test_ops.py has their cases."""


@pytest.mark.full
def test_the_torch_fallback_passes_the_checks():
    only = [word for name in CHECKS for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "inl", "check", "cpu:0", "--json", "--seed", "1", *only],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"INL_CPU": "torch"},
    )
    card = json.loads(done.stdout)
    assert card["failures"] == []
    assert card["ops"]["linear"]["kernels"] == ["eager"]
    assert "torch" in card["versions"]
