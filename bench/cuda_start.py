"""Breakdown of the start on an NVIDIA GPU, from process start to first output.

    python bench/cuda_start.py MODEL.gguf [--runs 3] [--warm-up]

The same engine and request as ``cuda_serve.py --ready``, first with empty caches of
compiled kernels, then with full ones. The lower bound for any program on torch is a
process that imports torch and copies one number to the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

TORCH = "import torch; torch.zeros(1, device='cuda').item()"

CHILD = """
import json, sys, time
began = float(sys.argv[3])
spans, marks = {}, [("interpreter", time.time())]

def mark(name):
    marks.append((name, time.time()))

def timed(owner, name, label):
    plain = getattr(owner, name)
    def run(*args, **options):
        start = time.perf_counter()
        try:
            return plain(*args, **options)
        finally:
            spans[label] = spans.get(label, 0.0) + time.perf_counter() - start
    setattr(owner, name, run)

import numpy
mark("NumPy")
from inl import EngineConfig, InferenceEngine
from inl.plugin import make_backend
from inl.executor import load_plan, model_loader
from inl.runners.local_runner import LocalRunner
mark("INL")
language = model_loader.open_model(sys.argv[1])
mark("the model's file")
backend = make_backend("cuda:0")
mark("torch, context, Triton's digest")
from inl_torch.gpu.graphs import CapturedStep
timed(load_plan, "load_weights", "  weights")
timed(LocalRunner, "_precompile", "  kernels")
timed(CapturedStep, "_capture", "  captures")
config = EngineConfig(
    backend="cuda:0", max_batch=8, sampling="greedy", context=512,
    warm_up=sys.argv[2] == "yes",
)
runner = model_loader.start_runner(language, backend, config)
mark("runner")
with InferenceEngine(language, config=config, runner=runner) as engine:
    engine.generate([1, 2, 3, 4], max_tokens=2)
    mark("answer")
    programs = len([1 for name, _ in runner.executor.program_keys if name == "advance"])
rows, last = [], began
for name, at in marks:
    rows.append((name, at - last))
    last = at
print(json.dumps([rows, spans, programs]))
"""


def started(code: str, folder: str, *arguments: str) -> tuple[float, str]:
    """Run a process; return its seconds from start to end, and its output."""
    env = {**os.environ, "TRITON_CACHE_DIR": folder, "TRITON_HOME": folder}
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, str(start)],
        env=env, check=True, timeout=200, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return time.time() - start, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm-up", action="store_true", help="every program at once")
    given = parser.parse_args()
    found: list[tuple[float, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        alone = [started(TORCH, folder)[0] for _ in range(2)]
        for _ in range(given.runs):
            whole, out = started(
                CHILD, folder, given.path, "yes" if given.warm_up else "no"
            )
            found.append((whole, json.loads(out.splitlines()[-1])))
    heads = ["cold", *["warm"] * (given.runs - 1)]
    print(f"seconds; torch and one number alone: {min(alone):.2f}; "
          f"{found[0][1][2]} programs")  # fmt: skip
    print(f"{'':34}" + "".join(f"{head:>8}" for head in heads))
    table: dict[str, list[float]] = {}
    for _, (rows, spans, _) in found:
        for name, seconds in (*rows, *spans.items()):
            table.setdefault(name, []).append(seconds)
    for name, times in table.items():
        print(f"{name:34}" + "".join(f"{seconds:8.2f}" for seconds in times))
    print(f"{'whole process':34}" + "".join(f"{whole:8.2f}" for whole, _ in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
