"""bench/traced_cache.py: a donated cache is not copied, one that is kept is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "traced_cache.py"
MEGABYTES = 128


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or sys.platform != "linux",
    reason="needs jax and Linux: pip install 'jax[cpu]'",
)
def test_only_programs_without_donation_copy_the_cache():
    words = ["--megabytes", str(MEGABYTES), "--table", "1024"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    growth = {row["variant"]: row["peak_growth_megabytes"] for row in rows}
    assert growth["donated"] < MEGABYTES / 4
    assert growth["not donated"] > MEGABYTES / 2
