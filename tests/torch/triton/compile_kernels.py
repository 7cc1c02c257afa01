"""Compile every Triton kernel for one chip, with no chip, and say what it takes.

    python tests/torch/triton/compile_kernels.py cuda:90 [--table]

The kernels are called as a step calls them, on small CPU tensors, with launches
replaced by compilations; so the signatures are those that a launch would have. Prints
one JSON list of rows; with ``--table`` a table.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from inl.ops.attention import random_step
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.ops.step import empty_tables
from inl.spec.message import Row, step_frame
from inl.spec.values import Bucket, Cache, Step, Tables
from inl_torch import triton as ours
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.tuning import Tuning

WARP = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32}
HEADS, KV_HEADS, HIDDEN, INNER = 9, 3, 576, 256
"""Sizes of the default model where they shape the code; its group of 3 heads too."""


class Stub:
    """A driver that only names its target."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def target_of(name):
    kind, arch = name.split(":")
    if kind == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, WARP[arch])


def recording(found):
    """Compile instead of launching, and keep what was compiled."""
    plain = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        start = time.perf_counter()
        compiled = plain(self, *args, grid=(1,), warmup=True, **options)
        spent = time.perf_counter() - start
        if all(compiled is not known for known, _ in found):
            found.append((compiled, spent))

    JITFunction.run = functools.wraps(plain)(run)


def steps(dim):
    """(step, blocks) of one row, of a few, and with prompts."""
    yield random_step(np.random.default_rng(0), [40], [1], block_size=16)
    yield random_step(np.random.default_rng(0), [40, 3], [1, 1], block_size=16)
    yield random_step(np.random.default_rng(0), [40, 3], [1, 20], block_size=16)


def call_all(dtype, dim, tuning):
    """Every kernel once for each way in which it is cut."""
    kernels = {kernel.op: kernel.run for kernel in ours.kernels(tuning)}

    def x(*shape):
        return torch.ones(shape, dtype=dtype)

    width = HEADS * dim
    norm, out = Norm(x(HIDDEN)), Linear(x(HIDDEN, width), x(HIDDEN))
    qkv = StackedQkv(x(width + 2 * KV_HEADS * dim, HIDDEN), x(KV_HEADS * dim, HIDDEN))
    mlp = StackedMlp(x(2 * INNER, HIDDEN), x(HIDDEN, INNER))
    sums = {"eps": 1e-5}
    for host, blocks in steps(dim):
        step = Step(*(torch.from_numpy(np.asarray(a)) for a in host[:-1]))
        tokens, rows = step.tokens.shape[0], step.lengths.shape[0]
        q, k = x(tokens, HEADS, dim), x(tokens, KV_HEADS, dim)
        cache = Cache(*(x(blocks, 16, KV_HEADS, dim) for _ in range(2)))
        cos, sin = kernels["rope_table"](
            step.positions, dim=dim, theta=1e4, scaling=RopeScaling()
        )
        kernels["rope"](q, k, cos, sin)
        kernels["write_kv"](k, k, cache, step.writes[0])
        for window, cap in ((None, None), (7, 3.0)):
            attrs = {"scale": 0.1, "window": window, "cap": cap, "group": 0}
            kernels["attention"](q, cache, step, **attrs)
            if tokens == rows:
                kernels["attend_project"](q, k, k, cos, sin, cache, step, out, **attrs)
        y = kernels["embedding"](step.tokens, Embedding(x(97, HIDDEN)))
        for activation in ("silu", "gelu_tanh"):
            kernels["norm_mlp"](y, y, norm, mlp, activation=activation, **sums)
            kernels["gated_mlp"](y, mlp, activation=activation)
            kernels["gated_activation"](y, y, activation=activation)
        kernels["reduce_add_norm"](y, y, norm, **sums)
        kernels["norm_qkv"](y, y, norm, qkv, **sums)
        kernels["rms_norm"](y, norm, **sums)
        kernels["linear"](y, Linear(x(HIDDEN, HIDDEN)))
        logits = kernels["norm_logits"](y, y, step.samples, norm, out, **sums)
        bucket = Bucket(tokens, rows)
        frame = step_frame(
            bucket, [Row(1, [-1])], step=0, groups=1, block_size=16, decode_rows=1
        )
        tables = Tables(
            *(torch.from_numpy(a) for a in empty_tables(groups=1, slots=4, width=5))
        )
        kernels["make_step"](
            torch.from_numpy(frame), tables, bucket=bucket, block_size=16
        )
        for sampler in ("greedy", "draw"):
            kernels["choose"](logits, step, tables, sampler=sampler)


def resources(compiled, target):
    """Registers, spilled bytes and shared bytes of one compiled kernel."""
    shared = compiled.metadata.shared
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        numbers = [
            int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))
            for name in ("vgpr_count", "vgpr_spill_count")
        ]
        return (*numbers, shared)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    registers, stack = (
        int(re.search(rf"{name}:(\d+)", told).group(1)) for name in ("REG", "STACK")
    )
    return registers, stack, shared


def row(compiled, spent, dtype, dim, target):
    registers, spills, shared = resources(compiled, target)
    return {
        "kernel": compiled.metadata.name, "dtype": dtype, "dim": dim,
        "warps": compiled.metadata.num_warps, "registers": registers,
        "spills": spills, "shared": shared, "seconds": round(spent, 2),
        "tf32": "tf32" in compiled.asm.get("ptx", ""),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="cuda:90, hip:gfx942 and so on")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    given = parser.parse_args()
    target = target_of(given.target)
    driver.set_active(Stub(target))
    early = target.backend == "cuda" and target.arch >= 90
    rows, found = [], []
    recording(found)
    for dtype in given.dtypes:
        for dim in given.dims:
            call_all(getattr(torch, dtype), dim, Tuning(early=early))
            rows += [row(kept, spent, dtype, dim, target) for kept, spent in found]
            found.clear()
    if not given.table:
        print(json.dumps(rows))
        return
    for item in rows:
        print("  ".join(f"{value!s:>14}" for value in item.values()))


if __name__ == "__main__":
    sys.exit(main())
