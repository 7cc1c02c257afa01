"""Compile the Triton kernels of inl-intel for Intel GPUs without having one.

    python tests/plugins/intel/compile_xpu.py TOOLS pvc bmg lnl [--table]
    python tests/plugins/intel/compile_xpu.py TOOLS dg2-g10 --plant spill

TOOLS is the folder that ``fetch_compiler.py`` has filled. Triton compiles each kernel
to SPIR-V, and ocloc the SPIR-V to the instructions of the GPU. Prints one JSON list of
rows; with ``--table`` a table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

ROOT = Path(__file__).parents[3]
SPILLED = re.compile(r"spilled around (\d+)")
LARGE = "-cl-intel-256-GRF-per-thread"
"""Option of Intel's compiler for 256 registers instead of 128."""

WIDE = {
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_bfloat16_conversions": True, "has_subgroup_2d_block_io": True,
    "has_fp64": True, "sub_group_sizes": [16, 32], "gpu_subslice_count": 128,
    "max_work_group_size": 1024, "max_num_sub_groups": 64,
}  # fmt: skip
"""What Triton asks about GPUs with registers of 64 bytes. Those whose properties are
equal get the same SPIR-V."""

NARROW = WIDE | {
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
    "has_subgroup_2d_block_io": False, "has_fp64": False,
    "sub_group_sizes": [8, 16, 32], "gpu_subslice_count": 32, "max_num_sub_groups": 128,
}  # fmt: skip
"""Likewise, of 32 bytes."""

DEVICES = {"pvc": WIDE, "bmg": WIDE, "lnl": WIDE, "dg2-g10": NARROW}
"""ocloc's name of a GPU -> its properties: Data Center GPU Max, Arc B580 and Core Ultra
200V (both Xe2), and Arc A770."""


def use_triton(tools):
    """Import the Triton for Intel GPUs, and give it what it lacks.

    Its release is older than the one that the kernels are written for, which misses two
    modules; and its module in C, which needs SYCL's headers, only reads the type of an
    installed GPU.
    """
    sys.path.insert(0, str(tools / "site"))
    from triton.backends import backends
    from triton.language import core

    @core.builtin
    def never(_builder=None):
        return core.constexpr(False)

    info = ModuleType("triton.language.target_info")
    info.is_cuda = info.is_hip = never
    descriptor = ModuleType("triton.tools.tensor_descriptor")
    descriptor.TensorDescriptor = None
    sys.modules |= {info.__name__: info, descriptor.__name__: descriptor}
    parser = SimpleNamespace(parse_device_arch=lambda _: "")
    compiler = backends["intel"].compiler
    compiler.__init__.__globals__["compile_module_from_src"] = lambda *_: parser


def guarding(errors):
    """Record a kernel that Triton cannot compile, and go on."""
    from triton.runtime.jit import JITFunction

    plain = JITFunction.run

    def run(self, *args, **options):
        try:
            return plain(self, *args, **options)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            errors.append({"kernel": self.fn.__name__, "error": text[-400:]})

    JITFunction.run = run


def translated(properties, *, dtypes, dims, plant):
    """Return (kernels compiled to SPIR-V with dtype and dim, failed ones)."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    sys.path.insert(0, str(ROOT / "tests/torch/triton"))
    import compile_kernels as common

    from inl_intel.tuning import xpu_tuning
    from inl_torch.triton.common import WARPS

    # The tensors of the calls are in host memory.
    WARPS["cpu"] = WARPS["xpu"]
    target = GPUTarget("xpu", properties, 32)
    driver.set_active(common.Stub(target))
    found, kept, errors = [], [], []
    common.recording(found)
    guarding(errors)
    if plant:
        import planted_xpu_kernels

        planted_xpu_kernels.PLANTED[plant]()
        return [(kernel, "float32", 0) for kernel, _ in found], errors
    tuning = xpu_tuning(properties["gpu_subslice_count"])
    for dtype in dtypes:
        for dim in dims:
            common.call_all(getattr(torch, dtype), dim, tuning, packed=False)
            kept += [(kernel, dtype, dim) for kernel, _ in found]
            found.clear()
    return kept, errors


def assembled(tools, device, code):
    """Return (spilled registers, those with 256 for each thread, error) of SPIR-V.

    Intel's driver of Triton compiles again with 256 where many are spilled.
    """
    spills, error = compiled_by_ocloc(tools, device, code)
    large = 0
    if spills:
        large, error = compiled_by_ocloc(tools, device, code, "-options", LARGE)
    return spills, large, error


def compiled_by_ocloc(tools, device, code, *options):
    """Return (spilled registers, error) of SPIR-V."""
    usr = tools / "debian/usr"
    libraries, (ocloc,) = usr / "lib/x86_64-linux-gnu", usr.glob("bin/ocloc*")
    # With its own C library, which may be newer than the machine's.
    loader = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "kernel.spv")
        file.write_bytes(code)
        done = subprocess.run(
            [
                *loader, ocloc, "compile", "-file", file, "-spirv_input",
                "-device", device, "-out_dir", place, *options,
            ],
            capture_output=True, text=True, cwd=place, check=False, timeout=600,
        )  # fmt: skip
        made = [path for path in Path(place).glob("*.bin") if path.stat().st_size]
    told = done.stdout + done.stderr
    error = "" if done.returncode == 0 and made else told[-400:] or "no output"
    return max(map(int, SPILLED.findall(told)), default=0), error


def rows(tools, device, kernels):
    """One row for each compiled kernel; equal code is assembled once."""
    codes = [kernel.asm["spv"] for kernel, *_ in kernels]
    different = {hashlib.sha256(code).digest(): code for code in codes}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(partial(assembled, tools, device), different.values())
        known = dict(zip(different, results, strict=True))
    for (kernel, dtype, dim), code in zip(kernels, codes, strict=True):
        told = kernel.metadata
        spills, large, error = known[hashlib.sha256(code).digest()]
        yield {
            "device": device, "kernel": told.name, "dtype": dtype, "dim": dim,
            "warps": told.num_warps, "lanes": told.threads_per_warp,
            "shared": told.shared, "spills": spills, "large": large, "error": error,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", type=Path)
    parser.add_argument("devices", nargs="+", choices=DEVICES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--plant", help="a kernel of planted_xpu_kernels.py instead")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    tools = given.tools.resolve()
    use_triton(tools)
    from triton.runtime.jit import JITFunction

    found = []
    for properties, devices in groupby(given.devices, DEVICES.__getitem__):
        with mock.patch.object(JITFunction, "run", JITFunction.run):
            kernels, errors = translated(
                properties, dtypes=given.dtypes, dims=given.dims, plant=given.plant
            )
        for device in devices:
            found += [{"device": device, **error} for error in errors]
            found += rows(tools, device, kernels)
    if not given.table:
        print(json.dumps(found))
        return
    for item in found:
        print("  ".join(f"{value!s:>10.60}" for value in item.values()))


if __name__ == "__main__":
    main()
