"""Correctness and speed of decoding on an NVIDIA GPU, through the whole engine.

    python bench/cuda_decode.py MODEL.gguf tests/data/smollm2-oracle.json

Every case of the oracle is generated alone and in one batch. Then batches are timed, in
each dtype, with the Triton kernels and with the eager kernels alone, next to the time
in which a copy on the device reads the weights. Exits with 1 where a float32 token
differs from the oracle by more than a near tie.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from cuda_engines import weight_bytes
from cuda_steps import copy_rate
from torch.profiler import ProfilerActivity, profile

from inl.backend.base import DeviceMemory, Program
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import HostArray
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import LanguageModel, open_model
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.spec.program import ProgramInfo
from inl.spec.step import Bucket
from inl.testing.near_tie import compare
from inl_cuda.backend import CudaBackend
from inl_torch.backend import TorchBackend


@final
class WithoutTriton(TorchBackend):
    """The CUDA backend, its graphs and buckets, with eager kernels only."""

    traits = CudaBackend.traits

    def __init__(self, device: Device) -> None:
        self._inner = CudaBackend(device)
        self.device, self.place = device, self._inner.place

    def memory(self) -> DeviceMemory:
        return self._inner.memory()

    def message(self, data: HostArray) -> torch.Tensor:
        return self._inner.message(data)

    def numpy(self, x: Any) -> HostArray:
        return self._inner.numpy(x)

    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        return self._inner.buckets(limits)

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],
        info: ProgramInfo,
    ) -> Program:
        return self._inner.compile(function, bucket, consumes=consumes, info=info)


class Bench:
    """An engine with one set of kernels."""

    def __init__(
        self, language: LanguageModel, kernels: str, dtype: str, batch: int
    ) -> None:
        self.name, self.dtype = kernels, dtype
        kind = CudaBackend if kernels == "triton" else WithoutTriton
        self.backend = kind(Device("cuda:0"))
        config = EngineConfig(
            backend="cuda:0", dtype=dtype, max_batch=batch, context=512,
            sampling="greedy", prefix_cache=False,
        )  # fmt: skip
        self.runner = start_runner(language, self.backend, config)
        self.engine = InferenceEngine(language, config=config, runner=self.runner)

    def close(self) -> None:
        self.engine.close()

    def wait(self) -> None:
        torch.cuda.synchronize()

    @property
    def place(self) -> torch.device:
        return self.backend.place

    def agreement(self, cases: list[dict[str, Any]]) -> bool:
        """Generate the oracle's cases alone and batched; print where they diverge."""
        alone = [
            self.engine.generate(case["prompt_ids"], max_tokens=len(case["token_ids"]))
            for case in cases
        ]
        prompts = [case["prompt_ids"] for case in cases]
        together = self.engine.generate(prompts, max_tokens=64)
        right = True
        for way, found in (("one at a time", alone), ("batched", together)):
            seen = [
                compare(answer.token_ids, case["token_ids"], case["margins"])
                for answer, case in zip(found, cases, strict=True)
            ]
            equal = sum(
                list(answer.token_ids) == case["token_ids"]
                for answer, case in zip(found, cases, strict=True)
            )
            right &= all(item.allowed(self.dtype) for item in seen)
            parted = [item for item in seen if item.gap]
            print(f"{self.name} {self.dtype} {way}: {equal} of {len(cases)} {parted}")
        return right

    def ms_per_step(self, prompt: list[int], rows: int, count: int) -> float:
        """Time from the first to the last token of ``rows`` requests."""
        prompts = [[*prompt, 100 + row] for row in range(rows)]
        self.engine.generate(prompts, max_tokens=4, ignore_eos=True)
        self.wait()
        start = time.perf_counter()
        self.engine.generate(prompts, max_tokens=2, ignore_eos=True)
        middle = time.perf_counter()
        self.engine.generate(prompts, max_tokens=count, ignore_eos=True)
        spent = (time.perf_counter() - middle) - (middle - start)
        return 1e3 * spent / (count - 2)

    def spent(self, prompt: list[int]) -> None:
        """Print the device time by kernel while one sequence decodes."""
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.engine.generate(prompt, max_tokens=32)
        table = seen.key_averages()
        print(table.table(sort_by="self_cuda_time_total", row_limit=22,
                          max_name_column_width=60))  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    cases = json.loads(given.oracle.read_text())["cases"]
    prompt = cases[1]["prompt_ids"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    right, lines = True, []
    for dtype in ("float32", "bfloat16"):
        for kernels in ("triton", "torch"):
            bench = Bench(
                open_model(given.model), kernels, dtype, max(*given.rows, len(cases))
            )
            right &= bench.agreement(cases) or dtype != "float32"
            rate = copy_rate()
            floor = 1e3 * weight_bytes(bench.runner.loaded.weights) / rate
            for rows in given.rows:
                times = [
                    bench.ms_per_step(prompt, rows, given.tokens)
                    for _ in range(given.runs)
                ]
                ms = statistics.median(times)
                lines.append(
                    f"{dtype:9} {kernels:7} {rows:4} {ms:8.3f} {min(times):8.3f} "
                    f"{1e3 * rows / ms:9.0f} {floor:8.3f} {floor / ms:6.1%}"
                )
            if given.profile:
                bench.spent(prompt)
            bench.close()
    print(f"copies run at {rate / 1e9:.0f} GB/s")
    print("dtype     kernels rows  ms/step  fastest  tokens/s  ceiling  share")
    print("\n".join(lines))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
