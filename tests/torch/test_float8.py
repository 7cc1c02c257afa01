"""A cache in float8 on eager torch, against the float64 bodies."""

from __future__ import annotations

import numpy as np
import pytest

from inl.ops import catalog
from inl.testing.float8_cases import OPS, float8_cases
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from inl_torch import eager
from op_cases import Target

SEED = 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", OPS)
def test_writes_and_reads(name, dtype, backend):
    spec, rng = catalog()[name], np.random.default_rng(SEED)
    target = Target(backend, eager.kernels())
    for case in float8_cases(spec, list(spec.cases(rng)), rng):
        call = OpCall(target, spec, case, dtype)
        require_passed(judged(call, case, run_checked(call, SEED)), call, SEED)
