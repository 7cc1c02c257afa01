"""Every case of an op on a backend's kernels, compared with its float64 body."""

from __future__ import annotations

import zlib

import numpy as np

from inl.ops import catalog
from inl.spec.selection import KernelSelection
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked

PRIMITIVES = {name: spec for name, spec in catalog().items() if not spec.composite}


class Target:
    """The context of calls: a backend and its kernels."""

    def __init__(self, backend, kernels):
        self.backend, self.selection = backend, KernelSelection(tuple(kernels))


def check(target, name, dtype):
    """Judge every case of an op; returns the number of cases."""
    spec = catalog()[name]
    seed = zlib.crc32(name.encode())
    cases = list(spec.cases(np.random.default_rng(seed)))
    for case in cases:
        call = OpCall(target, spec, case, dtype)
        require_passed(judged(call, case, run_checked(call, seed)), call, seed)
    return len(cases)
