"""Every primitive op as an ONNX graph, compared with its float64 body."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.selection import KernelSelection
from inl.testing.check import CheckFailed
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from inl_onnx import kernels
from inl_onnx.kernels import attention, layers
from inl_onnx.kernels.kernel import kernel

PRIMITIVES = {name: spec for name, spec in catalog().items() if not spec.composite}


class OnOnnx:
    """The context of calls: a backend and its kernels."""

    def __init__(self, backend, given=kernels.KERNELS):
        self.backend, self.selection = backend, KernelSelection(tuple(given))


def check(target, name, dtype):
    """Judge every case of an op; returns the number of cases."""
    spec = catalog()[name]
    seed = zlib.crc32(name.encode())
    cases = list(spec.cases(np.random.default_rng(seed)))
    for case in cases:
        call = OpCall(target, spec, case, dtype)
        require_passed(judged(call, case, run_checked(call, seed)), call, seed)
    return len(cases)


def test_every_primitive_op_has_a_kernel():
    assert {each.op for each in kernels.KERNELS} >= set(PRIMITIVES)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_cases(onnx_backend, name, dtype):
    assert check(OnOnnx(onnx_backend), name, dtype)


def half_a_window(q, cache, step, *, scale, window, cap, group):
    window = window and window - 1
    return attention.attention(
        q, cache, step, scale=scale, window=window, cap=cap, group=group
    )


def coarse_products(x, w):
    coarse = (w.weight * 256).node("Floor") * (1 / 256)
    return layers.product(x, coarse, w.bias)


PLANTED = {"attention": half_a_window, "linear": coarse_products}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_kernel_is_found(onnx_backend, name):
    others = [each for each in kernels.KERNELS if each.op != name]
    run = kernel(PLANTED[name], name).run
    wrong = OnOnnx(onnx_backend, [*others, Kernel(name, "wrong", run)])
    with pytest.raises(CheckFailed, match=f"{name}/wrong"):
        check(wrong, name, "float32")
