"""The ROCm backend on an NVIDIA GPU: all of it but its probe and its chip's name.

    python bench/rocm_on_cuda.py MODEL.gguf tests/data/smollm2-oracle.json

Runs every check of ``inl check rocm:0`` and the default model's oracle, in float32 and
bfloat16, one answer at a time and in one batch, with the launch parameters of an AMD
chip, and counts the graphs that are captured. Exits with 1 where anything fails. This
module is also the plugin that registers the device, so that child processes see it too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.device import Device, DeviceInfo, DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend
    from inl_rocm.backend import RocmBackend

MODULE = "rocm_on_cuda"
VARIABLE = "INL_BENCH_ROCM_CHIP"
"""Environment variable: architecture whose launch parameters are used."""

SHOWN = 10
"""Most findings printed."""


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(DeviceType.ROCM, f"{MODULE}:open_backend", probe=f"{MODULE}:probe")


def probe() -> list[DeviceInfo]:
    return [DeviceInfo(0, f"{os.environ[VARIABLE]} on an NVIDIA GPU")]


def open_backend(device: Device) -> RocmBackend:
    """Open the backend as if torch had found the chip."""
    from inl_rocm import backend, tuning
    from inl_torch.triton.attention import prompt

    backend.check_torch = lambda _device: None
    prompt.is_hopper = lambda _place: False
    for module in (backend, tuning):
        module.architecture = lambda _place: os.environ[VARIABLE]
    return backend.RocmBackend(device)


def count_captures() -> list[str]:
    """Record the graphs that are captured from now on."""
    from inl_torch.gpu.graphs import CapturedStep

    plain, captured = CapturedStep._capture, []

    def run(self: Any, *args: Any) -> Any:
        graph = plain(self, *args)
        captured.append(type(graph).__name__)
        return graph

    CapturedStep._capture = run  # type: ignore[method-assign]
    return captured


def check(captured: list[str]) -> bool:
    """Run the conformance kit; print a line per section."""
    from inl.testing.card import by_section
    from inl.testing.conformance import check_all
    from inl.testing.findings import findings
    from inl.testing.target import Target, default_seed

    began, before = time.perf_counter(), len(captured)
    results = check_all(Target(Device("rocm:0"), seed=default_seed()))
    for section, mine in by_section(results).items():
        passed = sum(result.status == "passed" for result in mine)
        print(f"  {section}: {passed} of {len(mine)} passed")
    failed = [result for result in results if result.status == "failed"]
    for finding in findings(results)[:SHOWN]:
        print("  " + "\n  ".join(finding.lines()))
    graphs = len(captured) - before
    print(f"inl check rocm:0: {len(results) - len(failed)} of {len(results)} passed, "
          f"{graphs} graphs, {time.perf_counter() - began:.0f} s")  # fmt: skip
    return bool(results) and not failed and graphs > 0


def oracle(model: Path, cases: Sequence[Any], dtype: str, captured: list[str]) -> bool:
    """Compare the answers with the oracle's under the gap rule; float32 exactly, one
    at a time.
    """
    from inl import EngineConfig, InferenceEngine
    from inl.testing.near_tie import compare

    began, before = time.perf_counter(), len(captured)
    config = EngineConfig(backend="rocm:0", dtype=dtype, max_batch=9, context=512)
    with InferenceEngine.from_pretrained(str(model), config) as engine:
        prompts = [case["prompt_ids"] for case in cases]
        counts = [len(case["token_ids"]) for case in cases]
        alone = [
            engine.generate(ids, max_tokens=count).token_ids
            for ids, count in zip(prompts, counts, strict=True)
        ]
        batched = [
            answer.token_ids for answer in engine.generate(prompts, max_tokens=64)
        ]
    right = True
    for name, answers, exact in (
        ("alone", alone, dtype == "float32"), ("batched", batched, False)
    ):  # fmt: skip
        compared = [
            compare(list(found), case["token_ids"], case["margins"])
            for found, case in zip(answers, cases, strict=True)
        ]
        equal = sum(each.gap is None for each in compared)
        allowed = sum(each.allowed(dtype) for each in compared)
        right &= allowed == len(cases) and (equal == len(cases) or not exact)
        print(f"  {dtype} {name}: {equal} of {len(cases)} equal, {allowed} allowed")
    graphs = len(captured) - before
    print(f"oracle in {dtype}: {'right' if right else 'WRONG'}, {graphs} graphs, "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    return right and graphs > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the default model's file")
    parser.add_argument("oracle", type=Path, help="tests/data/smollm2-oracle.json")
    parser.add_argument("--chip", default="gfx942", help="architecture")
    given = parser.parse_args()
    folders = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ["INL_PLUGINS"] = MODULE
    os.environ[VARIABLE] = given.chip

    import torch

    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, launch "
          f"parameters of {given.chip}")  # fmt: skip
    captured = count_captures()
    cases = json.loads(given.oracle.read_text("utf-8"))["cases"]
    right = [
        oracle(given.model, cases, dtype, captured) for dtype in ("float32", "bfloat16")
    ]
    right.append(check(captured))
    print("all right" if all(right) else "FAILED")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
