"""The import directions hold, and the linter that says so can say no."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command as run; run()"
SOURCES = (
    "core/src",
    "libs/inl-jax/src",
    "libs/inl-torch/src",
    "plugins/inl-cpu/src",
    "plugins/inl-cuda/src",
)


def lint(folder):
    paths = os.pathsep.join(str(folder / source) for source in SOURCES)
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_directions():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/src/inl/scheduling/scheduler.py", "import torch"),
        ("core/src/inl/spec/op.py", "import inl.engine.inference_engine"),
        ("core/src/inl/weights/quant.py", "import inl_torch"),
        ("libs/inl-torch/src/inl_torch/tensors.py", "import inl_cpu"),
        ("libs/inl-jax/src/inl_jax/functional.py", "import torch"),
        ("core/src/inl/functional.py", "import inl.engine.inference_engine"),
        ("plugins/inl-cpu/src/inl_cpu/probe.py", "import torch"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line):
    for source in SOURCES:
        shutil.copytree(ROOT / source, tmp_path / source)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    path.write_text(f"{path.read_text('utf-8')}\n{line}\n", "utf-8")
    found = lint(tmp_path)
    assert found.returncode == 1
    assert "BROKEN" in found.stdout
