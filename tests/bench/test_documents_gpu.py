"""The script for GPU machines runs with the packages that they have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from byte_tokens import bytes_as_tokens
from plain_byte_tokens import plain_bytes_as_tokens

ROOT = Path(__file__).parents[2]
ABSENT = ("tokenizers", "jax", "jinja2", "llguidance", "typer", "pytest")
BLOCK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_the_plain_tokenizer_is_that_of_the_library():
    plain, library = plain_bytes_as_tokens(), bytes_as_tokens()
    assert plain.vocab_size == library.vocab_size == 256
    every = range(256)
    assert [*map(plain.token, every)] == [*map(library.token, every)]
    assert [*map(plain.token_bytes, every)] == [*map(library.token_bytes, every)]
    for text in ("", "Hello, how are you?", "na\u00efve \u65e5\u672c \U0001f600\n"):
        ids = plain.encode(text)
        assert ids == library.encode(text)
        assert plain.decode(ids) == text
    assert plain.decode([*every]) == library.decode([*every])


@pytest.mark.full
def test_every_block_runs_without_the_packages_of_the_command_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK, "utf-8")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "documents_gpu.py", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, errors="replace", timeout=600, check=False,
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout + done.stderr
    # Blocks on JAX itself, by name.
    assert last.endswith("0 failed, 6 left out"), last
    left_out = [
        line for line in done.stdout.splitlines() if line.startswith("left out")
    ]
    assert all(line.endswith("is on JAX itself") for line in left_out)
