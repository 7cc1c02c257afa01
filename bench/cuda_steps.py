"""Times of decoding steps on random weights, in total and by kernel.

    python bench/cuda_steps.py --model smollm2 --rows 1 8 32 --profile
    python bench/cuda_steps.py --model smollm2 --rows 1 --persistent both
    python bench/cuda_steps.py --model 8b --tuned
    python bench/cuda_steps.py --model moe --layers 6 --rows 1 8 64 --quantize int4

Every row decodes its previous token, which stays on the device. The ceiling is the time
in which a copy on the device reads the weights once. ``--tuned`` also times each step
with the results of ``inl tune``, ``--quantize`` with packed weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import deque
from dataclasses import replace
from inspect import getclosurevars
from itertools import product

import torch
from cuda_engines import kernels_of, weight_bytes
from random_models import SHAPES, Random, random_language
from torch.profiler import ProfilerActivity, profile

from inl.device import Device
from inl.executor.tuning_results import load_tuning_results
from inl.runners.local_runner import Loaded, LocalRunner
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.workload import TuningResults
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import plan_weights
from inl.weights.quantize.report import KINDS
from inl_cuda.backend import CudaBackend
from inl_cuda.settings import PERSISTENT
from inl_cuda.tuning import tuning

BLOCK = 16


def load(
    backend: CudaBackend, name: str, dtype: str, layers: int, quantize: str
) -> Loaded:
    language = random_language(name, layers=layers, quantize=quantize)
    model, config = language.model, replace(language.config, dtype=dtype)
    kernels = kernels_of(backend, quantize)
    stored = stored_specs(language.checkpoint)
    groups = plan_weights(model.weights(config), kernels, stored)
    weights = load_weights(groups, language.checkpoint, backend, dtype)
    return Loaded(model, config, groups, weights, KernelSelection(kernels))


class Bench:
    """A runner of which all rows decode."""

    def __init__(self, backend: CudaBackend, loaded: Loaded, rows: int, length: int):
        self.rows, self.length = rows, length
        width = -(-(length + 1200) // BLOCK)
        vocab = loaded.config.vocab_size
        limits = Limits(
            rows + 1, (width * rows + 1,), BLOCK, width, vocab, sampler="greedy"
        )
        self.runner = LocalRunner(backend, loaded, limits)
        for row in range(rows):
            table = list(range(1 + row * width, 1 + (row + 1) * width))
            self.runner.submit(
                admit_frame(
                    row + 1,
                    [table],
                    groups=1,
                    max_blocks_per_seq=width,
                    length=length,
                    last=row,
                )
            )
        self.frame = step_frame(
            Bucket(rows, rows),
            [Row(row + 1, [-1]) for row in range(rows)],
            step=0, groups=1, block_size=BLOCK, decode_rows=rows,
        )  # fmt: skip

    def run(self, count: int) -> None:
        flying: deque[int] = deque()
        for number in range(count):
            if len(flying) == 2:
                flying.popleft()
                self.runner.collect()
            self.runner.submit(self.frame)
            flying.append(number)
        for _ in flying:
            self.runner.collect()

    def ms(self, count: int = 100, runs: int = 5) -> float:
        self.run(3)
        found = []
        for _ in range(runs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.run(count)
            torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - start) / count)
        return statistics.median(found)

    def device_ms(self, replays: int = 30) -> float:
        """Time of the graph, replayed back to back without the host."""
        program = self.runner.executor.program("advance", Bucket(self.rows, self.rows))
        graph = getclosurevars(program).nonlocals["program"]._graph
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(5):
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / replays)
        return statistics.median(times)

    def spent(self, count: int = 20) -> None:
        """Print the launches per step and the mean time of each kernel."""
        self.run(3)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.run(count)
            torch.cuda.synchronize()
        events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
        events.sort(key=lambda e: -e.self_device_time_total)
        launches = sum(e.count for e in events) / count
        busy = sum(e.self_device_time_total for e in events) / count / 1e3
        print(f"  {launches:.1f} launches a step, {busy:.3f} ms in kernels")
        for e in events[:16]:
            mean = e.self_device_time_total / e.count
            print(f"    {e.count / count:6.1f} x {mean:8.2f} us  {e.key[:70]}")


def copy_rate() -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(10):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2e3 * source.nbytes / begin.elapsed_time(end))
    return statistics.median(rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--early", choices=["yes", "no", "both"], default="yes")
    parser.add_argument(
        "--persistent",
        choices=["yes", "no", "both"],
        default="yes",
        help="one kernel for steps of one row, where it takes the model",
    )
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--quantize", default="", choices=KINDS)
    parser.add_argument("--wide", action="store_true", help="int4 in groups of 128")
    given = parser.parse_args()
    backend, Random.wide_groups = CudaBackend(Device("cuda:0")), given.wide
    loaded = load(backend, given.model, given.dtype, given.layers, given.quantize)
    size = weight_bytes(loaded.weights)
    rate = copy_rate()
    floor = 1e3 * size / rate
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.model} "
          f"in {given.quantize or given.dtype}, weights {size / 1e9:.2f} GB, "
          f"copies {rate / 1e12:.2f} TB/s, ceiling {floor:.3f} ms/step")  # fmt: skip
    found = load_tuning_results(backend) if given.tuned else TuningResults()
    ways = {"yes": [True], "no": [False], "both": [True, False]}
    for rows in given.rows:
        for early, persistent in product(ways[given.early], ways[given.persistent]):
            os.environ[PERSISTENT] = str(int(persistent))
            tuned = replace(tuning(backend.place), pdl=early)
            backend.tuning = lambda tuned=tuned: tuned
            kernels = kernels_of(backend, given.quantize)
            for known in (TuningResults(), found) if found else (found,):
                selection = KernelSelection(kernels, tuning_results=known)
                bench = Bench(
                    backend, replace(loaded, selection=selection), rows, given.length
                )
                ms, device = bench.ms(), bench.device_ms()
                form = f"early {early}{', tuned' if known else ''}"
                form += "" if persistent else ", no persistent kernel"
                print(f"{rows:4} rows, {form}: "
                      f"{ms:.3f} ms/step, graph alone {device:.4f}, "
                      f"{1e3 * rows / ms:.0f} tokens/s, "
                      f"{floor / device:.0%} of the ceiling", flush=True)  # fmt: skip
                if given.profile and not early:
                    bench.spent()
                bench.runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
