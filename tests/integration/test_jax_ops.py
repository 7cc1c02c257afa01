"""Every op of the catalog on JAX, judged by its float64 body."""

from __future__ import annotations

import numpy as np
import pytest

from inl.dtypes import wrap
from inl.ops import catalog
from inl.spec.dispatch import DynamicOps
from inl.spec.tolerance import judge, stored
from inl.spec.tree import tree_map

SEED = 20


LEFT = {"drop_overflow", "load_balance_loss"} | {
    name for name, spec in catalog().items() if spec.since >= (2, 0)
}
"""Ops that no decoder calls, or that few do, which the scaffold leaves out."""


FIRST = 2
"""Cases of each op; the others, which JAX compiles one by one, are of long depth.

tests/plugins/tpu/test_xla_kernels.py has all of them on the same functions."""


def cases():
    for name, spec in catalog().items():
        if name in LEFT | {"moe_dispatch"}:
            continue
        for at, case in enumerate(spec.cases(np.random.default_rng(SEED))):
            marks = pytest.mark.long if at >= FIRST else ()
            yield pytest.param(spec, case, id=f"{name}-{case.name}", marks=marks)


@pytest.fixture(scope="module")
def jax_device(jax_module):
    return jax_module.jax_backend()("jax:0")


def verdict_on(backend, spec, case):
    def put(leaf):
        return backend.tensor(wrap(np.asarray(leaf)))

    arguments = [tree_map(put, argument) for argument in stored(case, "float32", "f4")]
    result = getattr(DynamicOps(backend.kernels()), spec.name)(*arguments, **case.attrs)
    found = tree_map(lambda leaf: backend.numpy(leaf).data, result)
    return judge(spec, case, "float32", found)


@pytest.mark.parametrize(("spec", "case"), list(cases()))
def test_case(jax_device, spec, case):
    verdict = verdict_on(jax_device, spec, case)
    assert verdict.passed, str(verdict)


def test_every_primitive_has_a_kernel_of_its_own(jax_module):
    primitive = {name for name, spec in catalog().items() if not spec.composite}
    assert set(jax_module.KERNELS) == primitive - LEFT


PLANTED = {
    "attention": lambda q, cache, step, run, **attrs: run(
        q, cache, step, **{**attrs, "scale": attrs["scale"] * 1.001}
    ),
    "rope": lambda q, k, cos, sin, run: run(q, k, cos, -sin),
    "rms_norm": lambda x, w, run, *, eps: run(x, w, eps=2 * eps),
    "sample": lambda logits, step, tables, run, **attrs: run(
        -logits, step, tables, **attrs
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_kernel_is_found(jax_module, name):
    right, wrong = jax_module.KERNELS[name], PLANTED[name]
    planted = {name: lambda *args, **attrs: wrong(*args, run=right, **attrs)}
    backend = jax_module.jax_backend(replaced=planted)("jax:0")
    spec = catalog()[name]
    verdicts = [
        verdict_on(backend, spec, case)
        for case in spec.cases(np.random.default_rng(SEED))
    ]
    assert not all(verdict.passed for verdict in verdicts)
