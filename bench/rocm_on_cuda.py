"""The ROCm backend on an NVIDIA GPU: all of it but its probe and its chip's name.

    python bench/rocm_on_cuda.py MODEL.gguf tests/data/smollm2-oracle.json

Runs every check of ``inl check rocm:0`` and the default model's oracle, in float32 and
bfloat16, one answer at a time and in one batch, with the launch parameters of an AMD
chip, and counts the graphs that are captured. Exits with 1 where anything fails. This
module is also the plugin that registers the device, so that child processes see it too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle_answers import checks_pass, follows_oracle

from inl.device import Device, DeviceInfo, DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend
    from inl_rocm.backend import RocmBackend

MODULE = "rocm_on_cuda"
VARIABLE = "INL_BENCH_ROCM_CHIP"
"""Environment variable: architecture whose launch parameters are used."""


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(DeviceType.ROCM, f"{MODULE}:open_backend", probe=f"{MODULE}:probe")


def probe() -> list[DeviceInfo]:
    return [DeviceInfo(0, f"{os.environ[VARIABLE]} on an NVIDIA GPU")]


def open_backend(device: Device) -> RocmBackend:
    """Open the backend as if torch had found the chip."""
    from inl_rocm import backend
    from inl_torch.triton.attention import prompt

    backend.check_torch = lambda _device: None
    prompt.is_hopper = lambda _place: False
    backend.architecture = lambda _place: os.environ[VARIABLE]
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
    """Run the conformance kit, which must capture graphs."""
    began, before = time.perf_counter(), len(captured)
    right = checks_pass("rocm:0")
    graphs = len(captured) - before
    print(f"  {graphs} graphs, {time.perf_counter() - began:.0f} s")
    return right and graphs > 0


def oracle(model: Path, cases: Path, dtype: str, captured: list[str]) -> bool:
    """Compare the answers with the oracle's; the engine must capture graphs."""
    began, before = time.perf_counter(), len(captured)
    right = follows_oracle(model, cases, "rocm:0", dtype)
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
    right = [
        oracle(given.model, given.oracle, dtype, captured)
        for dtype in ("float32", "bfloat16")
    ]
    right.append(check(captured))
    print("all right" if all(right) else "FAILED")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
