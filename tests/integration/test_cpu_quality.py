"""Rounding on the CPU costs little: perplexity beside decoded float32 weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "LICENSE"
"""A text that no one edits, so that the figures stay."""


MODES = {
    "float32": (1e-4, 1.0, 1e-7),
    "bfloat16, inputs int16": (5e-3, 0.98, 5e-4),
    "bfloat16, inputs int8": (5e-3, 0.95, 5e-3),
}
"""Most that each may cost of the perplexity, least agreement, and most divergence."""


@pytest.fixture(scope="module")
def rows():
    if os.environ.get("INL_CPU") == "torch":
        pytest.skip("INL_CPU=torch: these are modes of the native kernels")
    command = [sys.executable, str(ROOT / "bench" / "cpu_quality.py"), "--json"]
    command += ["--tokens", "512", "--text", str(TEXT), "--modes", *MODES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", MODES)
def test_perplexity_stays(rows, mode, capsys):
    row, (perplexity, agreement, divergence) = rows[mode], MODES[mode]
    with capsys.disabled():
        print(
            f"\n{mode}: perplexity {100 * (row['ratio'] - 1):+.3f} %, "
            f"greedy agreement {100 * row['greedy_agreement']:.1f} %"
        )
    assert abs(row["ratio"] - 1) <= perplexity
    assert row["greedy_agreement"] >= agreement
    assert 0 <= row["mean_kl"] + 1e-9 <= divergence


def test_the_text_is_predicted_at_all(rows):
    assert 1.5 < rows["reference float32"]["perplexity"] < 1000
