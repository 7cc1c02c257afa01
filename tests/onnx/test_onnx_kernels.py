"""Every primitive op as an ONNX graph, compared with its float64 body."""

from __future__ import annotations

import pytest

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.testing.check import CheckFailed
from inl_onnx import kernels
from inl_onnx.kernels import attention, layers
from inl_onnx.kernels.kernel import kernel
from op_cases import PRIMITIVES, Target, check

REQUIRED = {name for name in PRIMITIVES if catalog()[name].since < (2, 0)}
"""Ops but those of encoders and spans, which are refused by name."""


def test_every_primitive_op_has_a_kernel():
    assert {each.op for each in kernels.KERNELS} >= REQUIRED


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_cases(onnx_backend, name, dtype):
    assert check(Target(onnx_backend, kernels.KERNELS), name, dtype)


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
    wrong = Target(onnx_backend, [*others, Kernel(name, "wrong", run)])
    with pytest.raises(CheckFailed, match=f"{name}/wrong"):
        check(wrong, name, "float32")
