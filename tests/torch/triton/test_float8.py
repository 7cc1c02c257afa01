"""A cache in float8: every kernel that writes or reads one, and the conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_steps import attention_cases
from triton_place import DTYPES, IS_SLOW, PLACE

from inl.ops import catalog
from inl.testing.float8_cases import OPS, float8_cases, with_float8
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from op_cases import Target

# isort: split
from inl_torch import eager
from inl_torch import triton as ours
from inl_torch.triton.attention.float8 import from_cache, to_cache
from inl_torch.triton.tuning import Tuning

KERNELS = (*ours.kernels(Tuning()), *eager.kernels())
SMALL = tuple(ours.kernels(Tuning(processors=1)))
"""Of a chip that is full without splits of tiles."""

ROWS = [
    kernel
    for kernel in ours.kernels(Tuning())
    if (kernel.op, kernel.name) == ("attention", "triton_rows")
]
SEED = 5


def check(backend, spec, case, dtype, kernels=KERNELS):
    call = OpCall(Target(backend, kernels), spec, case, dtype)
    require_passed(judged(call, case, run_checked(call, SEED)), call, SEED)
    return call.kernels


@pytest.fixture
def place(backend):
    """A backend on the device of the kernels."""
    return type(backend)(backend.device, PLACE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_writes_and_reads(name, dtype, place):
    spec, rng = catalog()[name], np.random.default_rng(SEED)
    for case in float8_cases(spec, list(spec.cases(rng)), rng):
        used = check(place, spec, case, dtype)
        assert any("triton" in label for label in used) or name == "sink_attention"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernels", [KERNELS, SMALL, ROWS], ids=["triton", "small chip", "triton_rows"]
)
def test_splits_groups_and_tails(kernels, dtype, place):
    kernels = (*kernels, *eager.kernels())
    cases = list(attention_cases(np.random.default_rng(SEED)))
    for case in cases[:: 5 if IS_SLOW else 1]:
        check(place, catalog()["attention"], with_float8(case), dtype, kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rope_attend", "attend_project"])
def test_rotated_keys_are_rounded_once(name, dtype, place):
    spec = catalog()[name]
    for case in spec.cases(np.random.default_rng(SEED)):
        used = check(place, spec, with_float8(case), dtype)
        assert any(label.startswith("rope_attend/triton") for label in used), used


@triton.jit
def _converted(x, scales, codes, numbers, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = to_cache(tl.load(x + index), scales, 1)
    tl.store(codes + index, code)
    tl.store(numbers + index, from_cache(code, tl.float32))


def test_conversions_are_those_of_torch():
    """All codes, the numbers halfway between them and their neighbors, and scales."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    edges = torch.cat((finite, halves))
    near = [torch.nextafter(edges, torch.tensor(way)) for way in (1e9, -1e9)]
    extreme = torch.tensor([1e30, -1e30, 1e-30, torch.inf, -torch.inf, torch.nan, -0.0])
    x = torch.cat((edges, *near, extreme))
    x = torch.nn.functional.pad(x, (0, -len(x) % 256)).to(PLACE)
    for scale in (1.0, 0.37, 3e-4):
        found, values = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x)
        factor = torch.tensor([1.0, scale], device=PLACE)
        scaled = x * scale
        _converted[(len(x) // 256,)](scaled, factor, found, values, BLOCK=256)
        wanted = (scaled / factor[1]).clamp(-448, 448).to(torch.float8_e4m3fn)
        same = found == wanted.view(torch.uint8)
        is_nan = wanted.float().isnan() & values.isnan()
        assert (same | is_nan).all(), scale
        assert torch.equal(values[~is_nan], wanted.float()[~is_nan])
