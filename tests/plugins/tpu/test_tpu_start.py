"""A start compiles buckets in parallel; the next one reads them from the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from inl.spec.step import Bucket
from inl_jax import programs

WORKER = Path(__file__).parent / "start_worker.py"


def started(folder):
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        env={**os.environ, "INL_CACHE": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_second_start_compiles_nothing(tmp_path, capsys):
    first, second = started(tmp_path), started(tmp_path)
    with capsys.disabled():
        print(f"\nfirst start {first}, second start {second}")
    assert first["misses"] >= first["buckets"] > 1
    assert first["hits"] == 0
    assert second["misses"] == 0
    assert second["hits"] == first["misses"]


def test_programs_are_compiled_in_parallel(monkeypatch):
    """Each compilation waits until two are under way."""
    meeting = threading.Barrier(2)

    def compile_both():
        meeting.wait(timeout=300)
        return "compiled"

    class Waiting(programs.Compiler):
        def jitted(self, *_):
            return SimpleNamespace(
                lower=lambda *_: SimpleNamespace(compile=compile_both)
            )

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    compiler = Waiting(lambda error: error)
    argument = jnp.zeros(1)
    functions = [
        partial(lambda *_: None, SimpleNamespace(bucket=Bucket(size, size)))
        for size in (1, 2)
    ]
    compiler.precompile([partial(f, *[argument] * 3) for f in functions])
    tasks = list(compiler._started.values())
    assert [task.result() for task in tasks] == ["compiled", "compiled"]
