"""Compares the names of the kernels of a step with what the GPU runs.

    python bench/cuda_names.py [--model 8b] [--layers 2] [--quantize fp8|int4 [--wide]]
    python bench/cuda_names.py --trace FILE.json

Computes one decoding step of 1, 64 and 512 rows, a step of a prompt among rows and one
of a prompt alone, of a model with random weights, under torch's profiler. Prints for
each op the kernel that was selected and the device kernels seen in it. The exit status
is 1 if a kernel uses a language or library that it does not name, 2 if a step has no
device kernels at all. ``--trace`` reads such a profile from a file, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NamedTuple

from inl.spec.kernel import Kernel
from inl.spec.step import Bucket

PREFIX = "kernel "
"""Beginning of the names of profiled ranges; a kernel's label follows."""

BUCKETS = {
    "1 row": Bucket(1, 1), "64 rows": Bucket(64, 64), "512 rows": Bucket(512, 512),
    "a prompt among 16 rows": Bucket(2048, 16), "a prompt": Bucket(2048, 1),
}  # fmt: skip

WIDTH = 160
"""Blocks of a sequence: 2560 tokens."""

LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of calls that launch kernels."""

CUDA = ("one_row", "attend_one")
"""Kernels in CUDA C++ of this repository."""

CUDNN = re.compile(r"cudnn|fort_native_sdpa", re.IGNORECASE)
LIBRARY = re.compile(
    r"nvjet|gemm|gemv|cutlass|cublas|splitk|xmma|dot_kernel", re.IGNORECASE
)
MOVE = re.compile(
    r"copy|fill|memcpy|memset|catarray|index|gather|scatter|arange", re.IGNORECASE
)
"""Kernels of torch that move or convert numbers."""

FLOATS = re.compile(r"float|double|half|bfloat", re.IGNORECASE)
"""Types in the names of kernels of torch; others make lists of integers."""


class Range(NamedTuple):
    """A call of a kernel, in microseconds."""

    label: str
    start: float
    stop: float


def technology(name: str, triton: frozenset[str]) -> str | None:
    """Return what a device kernel is of; ``None`` if it only moves numbers.

    triton: names of the functions in Triton.
    """
    if name in triton:
        return "triton"
    if name.partition("(")[0].partition("<")[0] in CUDA:
        return "cuda"
    if CUDNN.search(name):
        return "cudnn"
    if LIBRARY.search(name):
        return "eager"
    if MOVE.search(name) or not FLOATS.search(name):
        return None
    return "eager"


def named(label: str) -> set[str]:
    """Return the technologies that a label names."""
    op, _, name = label.partition("/")
    return set(Kernel(op, name, print).technologies)


def ranges(events: Sequence[Mapping[str, Any]]) -> list[Range]:
    """Return the calls of kernels in a trace, in order. They do not overlap."""
    found = {
        Range(e["name"].removeprefix(PREFIX), e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)
    }
    return sorted(found, key=lambda each: each.start)


def by_label(events: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the device kernels of the calls of each kernel, and their counts.

    A device kernel is of the call in which it was launched.
    """
    calls = ranges(events)
    starts = [each.start for each in calls]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    found: dict[str, dict[str, int]] = {each.label: {} for each in calls}
    for event in events:
        if event.get("cat") != "kernel":
            continue
        # The device is waited for before and after a call.
        middle = event["ts"] + event["dur"] / 2
        at = launched.get(event.get("args", {}).get("correlation"), middle)
        index = bisect_right(starts, at) - 1
        if index >= 0 and at <= calls[index].stop:
            counts = found[calls[index].label]
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return found


def report(events: Sequence[Mapping[str, Any]], triton: frozenset[str]) -> list[str]:
    """Print the kernels of a trace; return the labels with false names."""
    wrong = []
    for label, counts in by_label(events).items():
        used = {name: technology(name, triton) for name in counts}
        is_false = bool({each for each in used.values() if each} - named(label))
        wrong += [label] if is_false else []
        print(f"  {label}{'  FALSE NAME' if is_false else ''}")
        for name, count in counts.items():
            print(f"    {count:4} x {used[name] or 'moves':6} {name[:90]}")
    return wrong


def triton_names() -> frozenset[str]:
    """Return the names of the functions in Triton."""
    from triton.runtime.jit import JITFunction

    from inl_torch import triton

    found = walk_packages(triton.__path__, f"{triton.__name__}.")
    modules = [import_module(each.name) for each in found]
    return frozenset(
        value.fn.__name__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    )


def profiled(given: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the trace of each step."""
    import torch
    from cuda_steps import load
    from random_models import Random
    from torch.profiler import ProfilerActivity, profile, record_function

    from inl.device import Device
    from inl.executor.model_step import advance
    from inl.runners.local_runner import LocalRunner
    from inl.spec import dispatch
    from inl.spec.limits import Limits
    from inl_cuda.backend import CudaBackend

    def noting(kernel: Kernel) -> Any:
        def call(*args: Any, **attrs: Any) -> Any:
            torch.cuda.synchronize()
            with record_function(PREFIX + kernel.label):
                result = kernel.run(*args, **attrs)
                torch.cuda.synchronize()
            return result

        return call

    dispatch.noting = noting
    backend, Random.wide_groups = CudaBackend(Device("cuda:0")), given.wide
    loaded = load(backend, given.model, "bfloat16", given.layers, given.quantize)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    limits = Limits(
        513, (WIDTH + 1,), 16, WIDTH, loaded.config.vocab_size, sampler="sample",
        buckets=tuple(BUCKETS.values()),
    )  # fmt: skip
    runner = LocalRunner(backend, loaded, limits)
    executor = runner.executor
    for name, bucket in BUCKETS.items():
        bucket = bucket._replace(sampler="sample")
        ops, message = executor.ops(bucket), executor.dummy_message(bucket)

        def step(ops: Any = ops, message: Any = message) -> None:
            with torch.inference_mode():
                advance(
                    ops, loaded.model, loaded.config, loaded.weights, message,
                    executor.state,
                )  # fmt: skip
            torch.cuda.synchronize()

        step()  # compiles
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=kinds) as seen:
            step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(path))
            yield name, json.loads(path.read_text())["traceEvents"]
    runner.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quantize", default="", choices=("", "fp8", "int4"))
    parser.add_argument("--wide", action="store_true", help="int4 in groups of 128")
    parser.add_argument("--trace", type=Path, help="a profile to read")
    given = parser.parse_args(arguments)
    if given.trace:
        trace = json.loads(given.trace.read_text())["traceEvents"]
        steps: Iterable[tuple[str, list[Any]]] = [(str(given.trace), trace)]
    else:
        steps = profiled(given)
    wrong: list[str] = []
    empty: list[str] = []
    for name, events in steps:
        print(f"{name}:", flush=True)
        wrong += report(events, triton_names())
        empty += [] if any(by_label(events).values()) else [name]
    print(f"false names: {', '.join(wrong) or 'none'}")
    if empty:
        print(f"no device kernels seen in: {', '.join(empty)}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
