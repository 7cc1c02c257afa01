"""Kernels with the launch parameters of AMD's chips, against the float64 bodies."""

from __future__ import annotations

import numpy as np
import pytest
from attention_steps import attention_cases
from selected import selected
from triton_place import PLACE

from inl.ops import catalog
from inl.spec.tolerance import judge
from inl_rocm.chips import CHIPS
from inl_rocm.tuning import chip_tuning

# isort: split
from inl_torch import triton as ours

WIDE, NARROW = "gfx942", "gfx1100"
"""A chip of 64 lanes, and one of 32, which has a table of attention tiles."""


def faults(chip, op, cases, dtype, on_torch, on_host):
    spec, tuning = catalog()[op], chip_tuning(CHIPS[chip], processors=8)
    for case in cases:
        arguments = on_torch(spec, case, dtype, PLACE)
        kernel = selected(ours.kernels(tuning), op, arguments, case.attrs)
        got = on_host(kernel.run(*arguments, **case.attrs))
        verdict = judge(spec, case, dtype, got)
        if not verdict.passed:
            yield f"{op}/{case.name} {dtype} on {chip}: {verdict}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_with_few_registers(dtype, seed, on_torch, on_host):
    cases = [
        case for case in attention_cases(np.random.default_rng(seed))
        if case.name.startswith(("long/9/3x64", "chunks/9/3x64", "chunks/4/1x128"))
    ]  # fmt: skip
    assert len(cases) == 6
    assert not list(faults(NARROW, "attention", cases, dtype, on_torch, on_host)), seed


@pytest.mark.parametrize(("chip", "op"), [(NARROW, "rope_attend"), (WIDE, "sample")])
def test_decoding_and_sampling(chip, op, seed, on_torch, on_host):
    cases = list(catalog()[op].cases(np.random.default_rng(seed)))
    assert not list(faults(chip, op, cases, "bfloat16", on_torch, on_host)), seed
