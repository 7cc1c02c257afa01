"""Every primitive op on XLA, compared with its float64 body."""

from __future__ import annotations

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.selection import KernelSelection
from inl.testing.check import CheckFailed
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from inl_jax import xla

PRIMITIVES = {name: spec for name, spec in catalog().items() if not spec.composite}


class OnTpu:
    """The context of calls: a backend and its kernels."""

    def __init__(self, backend, kernels=xla.KERNELS):
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


def test_every_primitive_op_has_a_kernel():
    assert {kernel.op for kernel in xla.KERNELS} == set(PRIMITIVES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_cases(tpu_backend, name, dtype):
    assert check(OnTpu(tpu_backend), name, dtype)


def half_a_window(q, cache, step, *, scale, window, cap, group):
    run = xla.attention.attention
    window = window and window - 1
    return run(q, cache, step, scale=scale, window=window, cap=cap, group=group)


def default_precision(x, w):
    y = jnp.einsum("tk,nk->tn", *(each.astype(jnp.bfloat16) for each in (x, w.weight)))
    return (y if w.bias is None else y + w.bias).astype(x.dtype)


PLANTED = {"attention": half_a_window, "linear": default_precision}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_kernel_is_found(tpu_backend, name):
    others = [kernel for kernel in xla.KERNELS if kernel.op != name]
    wrong = OnTpu(tpu_backend, [*others, Kernel(name, "wrong", PLANTED[name])])
    with pytest.raises(CheckFailed, match=f"{name}/wrong"):
        check(wrong, name, "float32")
