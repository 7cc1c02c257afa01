"""Every primitive op on XLA, compared with its float64 body."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from depth import only_long
from inl.spec.kernel import Kernel
from inl.testing.check import CheckFailed
from inl_jax import xla
from inl_jax.xla.kernel import inlined
from op_cases import PRIMITIVES, Target, check

OPS = sorted({*PRIMITIVES, "ssm_scan", "xielu"})
"""Of composites those that XLA would compute token by token, or round too often."""


def test_every_primitive_op_has_a_kernel():
    assert {kernel.op for kernel in xla.KERNELS} == set(OPS)


WIDE_ONLY = (
    "biased_attention", "drop_overflow", "full_attention", "group_route",
    "inl_dynamics_step", "load_balance_loss", "route", "sink_attention",
    "span_attention", "sparse_attention", "token_routed_mlp", "verify",
)  # fmt: skip
"""Ops of other ops' functions or of integers, in bfloat16 at long depth only: JAX
compiles each for seconds."""

CASES = [(name, "float32") for name in OPS]
CASES += [
    only_long((name, "bfloat16")) if name in WIDE_ONLY else (name, "bfloat16")
    for name in OPS
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_cases(tpu_backend, name, dtype):
    assert check(Target(tpu_backend, xla.KERNELS), name, dtype)


def half_a_window(q, cache, step, *, scale, window, cap, group):
    run = xla.attention.attention
    window = window and window - 1
    return run(q, cache, step, scale=scale, window=window, cap=cap, group=group)


def default_precision(x, w):
    y = jnp.einsum("tk,nk->tn", *(each.astype(jnp.bfloat16) for each in (x, w.weight)))
    return (y if w.bias is None else y + w.bias).astype(x.dtype)


PLANTED = {"attention": inlined(half_a_window), "linear": default_precision}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_kernel_is_found(tpu_backend, name):
    others = [kernel for kernel in xla.KERNELS if kernel.op != name]
    wrong = Target(tpu_backend, [*others, Kernel(name, "wrong", PLANTED[name])])
    with pytest.raises(CheckFailed, match=f"{name}/wrong"):
        check(wrong, name, "float32")
