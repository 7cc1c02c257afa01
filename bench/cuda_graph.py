"""Correctness and speed of a decoding step as a CUDA graph.

    python bench/cuda_graph.py MODEL.gguf tests/data/smollm2-oracle.json

Every case of the oracle is decoded, eagerly and with the graph. Tokens are fed back on
the device: the host sends -1 and reads the sampled token one step later. Then both are
timed. Exits with 1 where a float32 token differs from the oracle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch.profiler import profile

from inl.backend.base import DeviceMemory, Program, Traits
from inl.backend.host import host_memory
from inl.checkpoints.checkpoint import open_checkpoint
from inl.device import Device
from inl.dtypes import HostArray
from inl.executor.local_runner import Loaded, LocalRunner
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import check_tensors, plan_weights
from inl_torch.backend import TorchBackend, inference_mode
from inl_torch.gpu.graphs import AsyncHostCopy, capture

BLOCK = 16
DECODE = Bucket(1, 1)
SLOT = 1


@final
class BenchBackend(TorchBackend):
    """A torch device that optionally captures the decoding step."""

    traits = Traits(dtypes=("float32", "bfloat16"), block_size=BLOCK)

    def __init__(self, device: Device, *, captures: bool = False) -> None:
        self.device = device
        self.place = torch.device(device.type, device.index)
        self.captures = captures

    def memory(self) -> DeviceMemory:
        if self.place.type == "cpu":
            return host_memory()
        free, total = torch.cuda.mem_get_info(self.place)
        return DeviceMemory(total, free)

    def numpy(self, x: Any) -> HostArray:
        return super().numpy(x.wait() if isinstance(x, AsyncHostCopy) else x)

    def compile(
        self, function: Program, bucket: Bucket | None, *, consumes: Any
    ) -> Program:
        if self.captures and bucket == DECODE and consumes == (2,):
            return capture(function)
        return inference_mode(function)

    def wait(self) -> None:
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner of one sequence."""

    name: str
    backend: BenchBackend
    runner: LocalRunner

    def decode(self, prompt: list[int], count: int) -> list[int]:
        """Prefill and generate ``count`` tokens, with at most ``depth`` steps in
        flight."""
        self.admit()
        return list(self.steps([prompt] + [[-1]] * (count - 1)))

    def admit(self) -> None:
        width = self.runner.limits.max_blocks_per_seq
        table = list(range(1, width + 1))
        self.runner.submit(
            admit_frame(SLOT, [table], groups=1, max_blocks_per_seq=width)
        )

    def steps(self, rows: list[list[int]]) -> Iterator[int]:
        flying: deque[int] = deque()
        for number, tokens in enumerate(rows):
            if len(flying) == self.runner.limits.depth:
                flying.popleft()
                yield int(self.runner.collect().tokens[0, 0])
            self.runner.submit(
                step_frame(
                    Bucket(len(tokens), 1),
                    [Row(SLOT, tokens)],
                    step=number,
                    groups=1,
                    block_size=BLOCK,
                    decode_rows=int(tokens == [-1]),
                )
            )
            flying.append(number)
        for _ in flying:
            yield int(self.runner.collect().tokens[0, 0])

    def ms_per_token(self, prompt: list[int], count: int) -> float:
        """Wall time of decoding, synchronized at both ends."""
        self.decode(prompt, 2)
        self.backend.wait()
        start = time.perf_counter()
        for _ in self.steps([[-1]] * count):
            pass
        self.backend.wait()
        return 1e3 * (time.perf_counter() - start) / count


def load(path: Path, backend: BenchBackend, dtype: str) -> Loaded:
    checkpoint = open_checkpoint(path)
    config = replace(MODEL.config(checkpoint.config), dtype=dtype)
    kernels = tuple(backend.kernels())
    stored = stored_specs(checkpoint)
    groups = plan_weights(MODEL.weights(config), kernels, stored)
    check_tensors(groups, stored, str(path))
    weights = load_weights(groups, checkpoint, backend, dtype)
    return Loaded(MODEL, config, groups, weights, KernelSelection(kernels))


def weight_bytes(weights: Any) -> int:
    """Fewest bytes read per token: each tensor once, but one row of the embedding."""
    stores = (x.untyped_storage() for x in leaves(weights._replace(embed=None)))
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def copy_rate(backend: BenchBackend) -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    size = 2**30 if backend.place.type == "cuda" else 2**27
    source = torch.ones(size // 4, device=backend.place)
    target = torch.empty_like(source)
    rates = []
    for _ in range(20):
        backend.wait()
        start = time.perf_counter()
        target.copy_(source)
        backend.wait()
        rates.append(2 * size / (time.perf_counter() - start))
    return statistics.median(rates)


def launches(bench: Bench, prompt: list[int]) -> str:
    """Launches and aten calls of one decoding step, by torch's profiler."""
    bench.decode(prompt, 2)
    with profile() as seen:
        list(bench.steps([[-1]]))
    names = {event.key: event.count for event in seen.key_averages()}
    kernels = sum(n for key, n in names.items() if "LaunchKernel" in key)
    graphs = sum(n for key, n in names.items() if "GraphLaunch" in key)
    calls = sum(n for key, n in names.items() if key.startswith("aten::"))
    return f"{kernels} kernel launches, {graphs} graph launches, {calls} aten calls"


def agreement(bench: Bench, cases: list[dict[str, Any]]) -> bool:
    """Compare with the oracle; print where a case diverges, and by what margin."""
    equal = 0
    for index, case in enumerate(cases):
        want = case["token_ids"]
        got = bench.decode(case["prompt_ids"], len(want))
        equal += got == want
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)  # noqa: B905
            margin = case["margins"][at]
            print(f"  {bench.name}: case {index} differs at {at}, margin {margin}")
    print(f"{bench.name}: {equal} of {len(cases)} cases equal, token for token")
    return equal == len(cases)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: no graph there")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=256, help="timed in each run")
    parser.add_argument("--runs", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    device = Device(given.device)
    torch.set_float32_matmul_precision("highest")
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 means float32"
    cases = json.loads(given.oracle.read_text())["cases"]
    longest = max(len(case["prompt_ids"]) + len(case["token_ids"]) for case in cases)
    prompt = cases[0]["prompt_ids"]
    width = -(-max(longest, len(prompt) + given.tokens + 2) // BLOCK)

    plain = BenchBackend(device)
    loaded = load(given.model, plain, given.dtype)
    vocab = loaded.config.vocab_size
    limits = Limits(2, (width + 1,), BLOCK, width, vocab)
    benches = [Bench("eager", plain, LocalRunner(plain, loaded, limits))]
    if plain.place.type == "cuda":
        graphed = BenchBackend(device, captures=True)
        benches.append(Bench("graph", graphed, LocalRunner(graphed, loaded, limits)))
        print(f"{torch.cuda.get_device_name(plain.place)}, torch {torch.__version__}")
    print(f"{given.model.name} in {given.dtype} on {device}, {width * BLOCK} keys")

    right = [agreement(bench, cases) for bench in benches]
    rate, size = copy_rate(plain), weight_bytes(loaded.weights)
    floor = 1e3 * size / rate
    print(f"weights {size / 1e6:.1f} MB a token; copies run at {rate / 1e9:.0f} GB/s")
    print(f"ceiling {floor:.3f} ms/token")
    for bench in benches:
        found = [bench.ms_per_token(prompt, given.tokens) for _ in range(given.runs)]
        middle = statistics.median(found)
        print(
            f"{bench.name}: {middle:.3f} ms/token (median of {len(found)}; "
            f"{min(found):.3f} to {max(found):.3f}), {floor / middle:.0%} of the "
            f"ceiling; {launches(bench, prompt)}"
        )
    return 0 if all(right) or given.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
