"""The Triton kernels without a GPU: tests in Triton's interpreter, in a subprocess."""

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
    pytest.param(path.name, marks=pytest.mark.long if path.name in LONG else ())
    for path in sorted(HERE.parent.glob("test_*.py"))
    if path != HERE and "from triton_place import" in path.read_text()
]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs them compiled")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter"
)
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_in_the_interpreter(file):
    path = str(Path(__file__).with_name(file))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
