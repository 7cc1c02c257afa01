"""Kinds of wrong kernels, traced by ``jax.jit``: each is found and named."""

from __future__ import annotations

from functools import partial

import pytest

from depth import only_long
from inl.backend.simple import plain_state
from inl.spec.kernel import Kernel
from inl.testing.conformance import checks_of
from planted_kernels import failures, traced_target
from planted_kinds import KINDS

RIGHT = KINDS["64 heads"]._replace(plant=lambda _xp, run: run)
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
    target = traced_target(jax_module, kernels, (kind.op,))
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


def traced_runner(jax_module, **fields):
    """A target with the kernels of the scaffold, which its programs trace."""
    kernels = partial(kernels_with, jax_module, RIGHT)
    return traced_target(jax_module, kernels, (), **fields)


@pytest.mark.long
def test_memory_that_traced_programs_keep_is_found(jax_module):
    held = []

    def compile_program(function, bucket, consumes, info):
        run = jax_module.jit(function, bucket, consumes)

        def program(*arguments):
            if info.name in ("advance", "logits"):
                held.append(jax_module.jnp.ones(1 << 18))
            return run(*arguments)

        return program

    target = traced_runner(jax_module, compile=compile_program)
    (found,) = failures(target, "runner", "runner/memory")
    assert found.first.message.startswith("each step keeps ")


@pytest.mark.long
def test_programs_that_are_mixed_up_are_found(jax_module):
    programs = {}

    def compile_program(function, bucket, consumes, info):
        key = info.name, info.limits, bucket
        if key not in programs:
            programs[key] = jax_module.jit(function, bucket, consumes)
        return programs[key]

    target = traced_runner(jax_module, compile=compile_program)
    (found,) = failures(target, "runner", "runner/programs")
    assert "a program must be that of the function that `compile` got" in (
        found.first.message
    )


@pytest.mark.long
def test_caches_that_two_traced_runners_share_are_found(jax_module):
    made = {}

    def state(spec, limits):
        fresh = plain_state(spec, limits, jax_module.tensor)
        caches = made.setdefault((spec, limits), fresh.caches)
        return fresh._replace(caches=caches)

    target = traced_runner(jax_module, state=state)
    found = failures(target, "runner", "runner/two")
    assert len(found) == 1
    assert "Backend.state must return new arrays" in found[0].first.message
