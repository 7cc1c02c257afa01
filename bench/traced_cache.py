"""Decode steps of the traced scaffold on a large cache: time and peak memory.

    python bench/traced_cache.py [--megabytes 3072] [--context 300] [--table 8192]

A small Llama on ``inl new-plugin --style traced`` (``jax.jit`` on the CPU). Compares
donated caches with programs that do not donate them, and programs for several context
lengths with one for the whole block table. Prints one JSON object per row; "copy_ms"
is the time to copy as many bytes as the cache has. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from inl.backend.base import ContextLengths
from inl.device import Device
from inl.models.llama import MODEL
from inl.plugin import simple_backend
from inl.spec.limits import Limits
from inl.spec.message import admit_frame
from inl.testing.play import one_step
from inl.testing.scaffold import create
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama

SIZES = {"layers": 8, "heads": 8, "kv_heads": 8, "head_dim": 64, "hidden": 256}
TOKEN_BYTES = 2 * SIZES["layers"] * SIZES["kv_heads"] * SIZES["head_dim"] * 4
BLOCK = 16
STEPS = 8
VARIANTS = ("donated", "donated, one length", "not donated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=3072, help="of the cache")
    parser.add_argument("--context", type=int, default=300, help="tokens before")
    parser.add_argument("--table", type=int, default=8192, help="most tokens of a row")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options)))
        return
    for variant in VARIANTS:
        # A process each: memory that one has freed is not counted for the next.
        words = [*sys.argv, "--variant", variant]
        subprocess.run([sys.executable, *words], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return time and peak memory of a decode step."""
    blocks = (options.megabytes << 20) // (TOKEN_BYTES * BLOCK)
    limits = Limits(
        2, (blocks,), BLOCK, options.table // BLOCK, 96, sampler="greedy", depth=1
    )
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(0), **SIZES))
    with tempfile.TemporaryDirectory() as folder:
        backend = make_backend(Path(folder), options.variant)
    runner = local_runner(backend, MODEL, files, limits)
    held = range(1, 2 + (options.context + STEPS) // BLOCK)
    # The keys and values of the context are zeros, as they were allocated.
    runner.submit(
        admit_frame(
            1, [held], groups=1, max_blocks_per_seq=limits.max_blocks_per_seq,
            length=options.context, last=7,
        )
    )  # fmt: skip
    numbers = iter(range(1, 1000))

    def step() -> None:
        frame = one_step(runner.limits, [(1, [-1])], step=next(numbers), decoding=1)
        runner.submit(frame)
        runner.collect()

    step()  # compiles the program
    before = reset_peak()
    seconds = []
    for _ in range(STEPS - 1):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return {
        "variant": options.variant,
        "cache_megabytes": options.megabytes,
        "context": options.context,
        "table": options.table,
        "step_ms": round(1e3 * float(np.median(seconds)), 2),
        "peak_growth_megabytes": round((memory("VmHWM") - before) / 2**20, 1),
        "copy_ms": round(copy_ms(options.megabytes), 1),
    }


def make_backend(folder: Path, variant: str) -> Any:
    """Import the scaffold and return its backend, changed as the variant says."""
    sys.path.insert(0, str(create("bench", folder, style="traced") / "src"))
    from inl_bench import backend

    def without_donation(function: Any, bucket: Any, _: Any, info: Any) -> Any:
        return backend.compile_program(function, bucket, (), info)

    kept = variant == "not donated"
    lengths = [] if "one length" in variant else [ContextLengths(backend.lengths)]
    make = simple_backend(
        tensor=backend.tensor, numpy=backend.numpy, kernels=backend.kernels,
        compile=without_donation if kept else backend.compile_program,
        buckets=backend.buckets, capabilities=lengths, traits=backend.Backend.traits,
    )  # fmt: skip
    return make(Device("bench:0"))


def reset_peak() -> int:
    """Let the peak begin at the memory in use, and return that, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Return a size from the status of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def copy_ms(megabytes: int) -> float:
    """Return the time to copy so many bytes, in pieces of 64 MiB."""
    source, target = (np.ones(64 << 20, np.uint8) for _ in range(2))
    began = time.perf_counter()
    for _ in range(max(megabytes // 64, 1)):
        np.copyto(target, source)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
