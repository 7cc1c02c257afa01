"""The benchmarks are scripts: their folder is no package, but it is importable."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "peers" / "drivers")]
