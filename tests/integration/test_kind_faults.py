"""Kinds of wrong kernels, traced by ``jax.jit``: each is found and named."""

from __future__ import annotations

from functools import partial

import pytest

from depth import only_long
from inl.spec.kernel import Kernel
from inl.testing.conformance import checks_of
from planted_kernels import failures, traced_target
from planted_kinds import KINDS

QUICK = ("64 heads", "ties of blocks", "short chunks")


def kernels_with(jax_module, kind):
    """List the kernels of the scaffold, traced, and a wrong one."""
    right = dict(jax_module.KERNELS)
    run = kind.plant(jax_module.jnp, right.get(kind.op))
    for op, kernel in {**right, kind.op: run}.items():
        yield Kernel(op, "planted", traced(jax_module.jax, kernel))


def traced(jax, run):
    return lambda *args, **attrs: jax.jit(partial(run, **attrs))(*args)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else only_long(name) for name in KINDS]
)
def test_a_wrong_kernel_is_found_by_its_case_and_named(jax_module, name):
    kind = KINDS[name]
    kernels = partial(kernels_with, jax_module, kind)
    target = traced_target(jax_module, kernels, kind.op)
    names = [check.name for check in checks_of(target, ["kernel"])]
    found = [
        finding
        for case in names
        if kind.case in case
        for finding in failures(target, "kernel", case)
    ]
    assert found
    text = "\n".join(found[0].lines())
    assert f"{kind.op}/planted" in text
    assert kind.case in text
