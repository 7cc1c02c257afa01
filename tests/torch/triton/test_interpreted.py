"""The Triton kernels without a GPU: tests in Triton's interpreter, in subprocesses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__)
LONG = ("test_float8.py", "test_packed.py")
"""Take minutes; for Hopper GPUs, and used on request only: ``make test-long``."""

FILES = [
    path.name
    for path in sorted(HERE.parent.glob("test_*.py"))
    if path != HERE and "from triton_place import" in path.read_text()
]
BATCHES = 4
"""Processes of the other files. Each takes seconds to start."""

SHORT = [name for name in FILES if name not in LONG]
PARTS = [SHORT[at::BATCHES] for at in range(BATCHES)]
PARTS += [pytest.param([name], marks=pytest.mark.long) for name in LONG]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs them compiled")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter"
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("files", PARTS, ids=" ".join)
def test_every_kernel_in_the_interpreter(files):
    paths = [str(HERE.with_name(name)) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
