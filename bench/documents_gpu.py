"""Run the blocks of the documents that INL replaces on an NVIDIA GPU.

Every Python block of ``tests/data/documents`` runs on torch tensors of the device, with
the device type of the document replaced by that of the device; its results are checked
as in ``tests/documents``. Then each GPU decorator and field that the documents show is
compared with float64 on the device. Prints one line for each, and exits with 1 where
anything fails. Needs torch, Triton, NumPy and pluggy, no JAX, no ``tokenizers``, no
network; blocks on JAX itself are listed as left out.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.kernels import (
    block_sparse_matmul,
    flash_attention,
    gemm,
    gpu_kernel,
    layer_norm,
    profile_kernel,
)
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

# In the folder that was just added.
from document_blocks import DOCUMENTS, JAX_ONLY, Document, blocks, on_host  # noqa: E402

WIDTHS = {"heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 256, "inner": 512}
"""Of a model whose kernels are those of real ones."""


def tiny_model():
    from plain_byte_tokens import plain_bytes_as_tokens

    made = tiny_llama(np.random.default_rng(5), vocab=256, **WIDTHS)
    checkpoint = MemoryCheckpoint(*made)
    model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    return model, plain_bytes_as_tokens()


class Report:
    """Counts what passed."""

    def __init__(self):
        self.failed, self.passed, self.left_out = 0, 0, 0

    def run(self, name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            call()
        except Exception:
            self.failed += 1
            print(f"FAIL  {name}\n{traceback.format_exc()}")
        else:
            self.passed += 1
            print(f"pass  {name}  {time.perf_counter() - start:.2f} s")


def arrays_on(name: str, number: int, place: str) -> AbstractContextManager[object]:
    """Make new tensors of a block on the device; engines place their own."""
    if name in ("tpu_inl", "tpu_devices") and (name, number) != ("tpu_inl", 0):
        return nullcontext()
    return torch.device(place)


def run_blocks(report: Report, device: Device, place: str) -> None:
    kind = f"DeviceType.{str(device.type).upper()}"
    replaced = {"DeviceType.TPU": kind, 'backend="auto"': f'backend="{device.type}"'}
    for name in DOCUMENTS:
        with arrays_on(name, 0, place):
            document = Document(name, tiny_model, "torch", replaced)
        for number in range(len(blocks(name))):
            label = f"{name} {number}"
            if (name, number) in JAX_ONLY:
                report.left_out += 1
                print(f"left out  {label}: is on JAX itself")
                continue
            with arrays_on(name, number, place):
                report.run(label, lambda d=document, n=number: d.run(n))
        if name == "tpu_devices":
            report.run(f"{name}: on {device}", lambda d=document: on_device(d, device))


def on_device(document: Document, device: Device) -> None:
    names = document.names
    assert names["tpu_device"].is_available()
    assert names["c"].device == device, names["c"].device
    assert str(names["c"].array.device).startswith(str(device.type))


def close(found: torch.Tensor, exact: np.ndarray, low: float, high: float) -> None:
    off = np.abs(on_host(found) - exact).max() / np.abs(exact).max()
    assert low <= off < high, f"error {off:.2g}, accepted {low} to {high}"


def run_fields(report: Report, place: str) -> None:
    """Check each field of the GPU blocks against float64."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 512, 512))
    x, y = (torch.asarray(each, dtype=torch.float32, device=place) for each in (a, b))
    is_gpu = place == "cuda"

    def product(**fields):
        kernel = gpu_kernel(**fields)(lambda x, y: gemm(x, y))
        found = kernel(x, y)
        assert found.device.type == place
        assert not is_gpu or ("torch" in kernel.compiled and not kernel.notes)
        return found

    torch.set_float32_matmul_precision("highest")
    bounds = {
        "plain": ({}, 0, 3e-6),
        "use_fp16": ({"use_fp16": True}, 1e-5, 5e-4),
        "use_bfloat16": ({"use_bfloat16": True}, 1e-4, 4e-3),
        "float8": ({"precision": "float8_e4m3fn"}, 3e-3, 6e-2),
        "block_size": ({"block_size": 64}, 0, 3e-6),
        "use_tensor_cores": (
            {"use_tensor_cores": True}, 1e-5 if is_gpu else 0, 2e-3,
        ),
    }  # fmt: skip
    for name, (fields, low, high) in bounds.items():
        report.run(
            f"gpu_kernel {name}",
            lambda f=fields, w=(low, high): close(product(**f), a @ b, *w),
        )
    torch.set_float32_matmul_precision("highest")

    q = torch.randn(2, 4, 700, 64, device=place)
    wide = q.double()
    scores = wide @ wide.mT / 8
    causal = torch.ones(700, 700, device=place, dtype=torch.bool).tril()
    exact = (scores.masked_fill(~causal, -torch.inf).softmax(-1) @ wide).cpu().numpy()

    def attention(flash):
        kernel = gpu_kernel(use_flash=flash)(
            lambda q: flash_attention(q, q, q, causal=True)
        )
        close(kernel(q), exact, 0, 1e-5)

    for flash in (True, False):
        report.run(f"gpu_kernel use_flash={flash}", lambda f=flash: attention(f))
    normal = torch.nn.functional.layer_norm(x.double(), (512,)).cpu().numpy()
    report.run("layer_norm", lambda: close(layer_norm(x), normal, 0, 1e-5))

    def sparse():
        values = torch.asarray(a[:128, :64].reshape(2, 64, 64), dtype=torch.float32)
        found = block_sparse_matmul(x, values.to(place), [[0, 1], [3, 0]], columns=512)
        matrix = np.zeros((512, 512))
        matrix[:64, 64:128], matrix[192:256, :64] = values.double().numpy()
        close(found, a @ matrix, 0, 3e-6)

    report.run("block_sparse_matmul", sparse)

    def profiled():
        with profile_kernel() as profile:
            product()
        assert all(place in event.device for event in profile.events), profile.events

    report.run("profile_kernel", profiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    words = parser.parse_args()
    device = Device(words.device)
    if reason := device.why_not():
        print(f"{device}: {reason}")
        return 1
    report = Report()
    name = torch.cuda.get_device_name() if words.device == "cuda" else "the CPU"
    print(f"{device} ({name}), torch {torch.__version__}, Python {sys.version[:7]}")
    run_blocks(report, device, words.device)
    run_fields(report, words.device)
    print(f"{report.passed} passed, {report.failed} failed, {report.left_out} left out")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
