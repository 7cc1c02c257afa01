"""Compile the Triton kernels of inl-intel for Intel GPUs without having one.

    python tests/plugins/intel/compile_xpu.py TOOLS pvc [--table] [--plant spill]

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
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parents[3]
SPILLED = re.compile(r"spilled around (\d+)")

XMX = {
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_bfloat16_conversions": True,
    "max_work_group_size": 1024,
}
"""What both families have: matrix units, and conversions of bfloat16."""

DEVICES = {
    "pvc": {
        **XMX, "sub_group_sizes": [16, 32], "has_fp64": True, "gpu_subslice_count": 128,
        "has_subgroup_2d_block_io": True, "max_num_sub_groups": 64,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    },
    "dg2-g10": {
        **XMX, "sub_group_sizes": [8, 16, 32], "has_fp64": False,
        "gpu_subslice_count": 32, "max_num_sub_groups": 128,
    },
}  # fmt: skip
"""ocloc's name of a GPU -> its properties: Data Center GPU Max, and Arc A770."""


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


def translated(name, *, dtypes, dims, plant):
    """Return (kernels compiled to SPIR-V with dtype and dim, failed ones)."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    sys.path.insert(0, str(ROOT / "tests/torch/triton"))
    import compile_kernels as common

    from inl_intel.backend import SHARED_BYTES
    from inl_torch.triton.tuning import Tuning

    properties = DEVICES[name]
    target = GPUTarget("xpu", {"name": name, **properties}, 32)
    driver.set_active(common.Stub(target))
    found, kept, errors = [], [], []
    common.recording(found)
    guarding(errors)
    if plant:
        import planted_kernels

        planted_kernels.PLANTED[plant]()
        return [(kernel, "float32", 0) for kernel, _ in found], errors
    processors = properties["gpu_subslice_count"]
    tuning = Tuning(processors=processors, shared_bytes=SHARED_BYTES)
    for dtype in dtypes:
        for dim in dims:
            common.call_all(getattr(torch, dtype), dim, tuning, packed=False)
            kept += [(kernel, dtype, dim) for kernel, _ in found]
            found.clear()
    return kept, errors


def assembled(tools, device, code):
    """Return (spilled registers, error) of SPIR-V, as ocloc compiles it."""
    libraries = [
        tools / "debian/usr/lib" / folder
        for folder in ("x86_64-linux-gnu", "x86_64-linux-gnu/intel-opencl")
    ]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "kernel.spv")
        file.write_bytes(code)
        done = subprocess.run(
            [
                tools / "debian/usr/bin/ocloc", "compile", "-file", file,
                "-spirv_input", "-device", device, "-out_dir", place,
            ],
            capture_output=True, text=True, cwd=place, check=False, timeout=600,
            env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))},
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
        spills, error = known[hashlib.sha256(code).digest()]
        yield {
            "kernel": told.name, "dtype": dtype, "dim": dim,
            "warps": told.num_warps, "lanes": told.threads_per_warp,
            "shared": told.shared, "spills": spills, "error": error,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", type=Path)
    parser.add_argument("device", choices=DEVICES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--plant", help="a kernel of planted_kernels.py instead")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    tools = given.tools.resolve()
    use_triton(tools)
    kernels, found = translated(
        given.device, dtypes=given.dtypes, dims=given.dims, plant=given.plant
    )
    found += rows(tools, given.device, kernels)
    if not given.table:
        print(json.dumps(found))
        return
    for item in found:
        print("  ".join(f"{value!s:>10.60}" for value in item.values()))


if __name__ == "__main__":
    main()
