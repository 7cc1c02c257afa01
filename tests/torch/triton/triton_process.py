"""Runs programs whose Triton kernels are not interpreted, in subprocesses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(source, folder):
    """Return the output of a program, or its error output."""
    script = folder / "program.py"
    script.write_text(source)
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = os.pathsep.join((str(Path(__file__).parent), kept.get("PYTHONPATH", "")))
    caches = {"TRITON_CACHE_DIR": str(folder), "TRITON_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300,
        check=False, env=kept | caches | {"PYTHONPATH": paths},
    )  # fmt: skip
    return done.stdout.strip() or done.stderr
