"""INL ops on JAX arrays: values, gradients and ``jit``."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'jax[cpu]'")
jnp = jax.numpy

from inl import (  # noqa: E402
    inl_dynamics,
    inl_dynamics_n_steps,
    inl_dynamics_step,
)
from inl.ops import catalog  # noqa: E402
from inl.ops.inl import InlBlock  # noqa: E402
from inl.spec.tolerance import BodyOps  # noqa: E402
from inl_jax.functional import inl_block  # noqa: E402

BOUND = 1e-6
NAMES = ("x", "v", "mu", "alpha", "beta", "gate", "dt")
BODY = {name: spec.body for name, spec in catalog().items()}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def off(found, want):
    return np.abs(found - want).max() / max(np.abs(want).max(), 1e-3)


def gradients(function, operands, weights):
    def total(*held):
        results = function(*held)
        return sum(jnp.sum(w * r) for w, r in zip(weights, results, strict=True))

    every = tuple(range(len(operands)))
    held = [jnp.asarray(x) for x in operands]
    return [np.asarray(g) for g in jax.jit(jax.grad(total, argnums=every))(*held)]


def body(x, v, mu, alpha, beta, gate, dt):
    return BODY["inl_dynamics"](x, v, mu, alpha, beta, gate, dt=float(dt))


def test_dynamics(dynamics_operands, measured_gradients):
    operands, weights = dynamics_operands
    want = measured_gradients(body, operands, weights)
    found = gradients(inl_dynamics, operands, weights)
    for name, got, exact in zip(NAMES, found, want, strict=True):
        assert got.dtype == np.float64
        assert got.shape == exact.shape
        assert off(got, exact) < BOUND, name


def test_a_wrong_gradient_is_found(dynamics_operands, measured_gradients):
    operands, weights = dynamics_operands
    want = measured_gradients(body, operands, weights)
    found = gradients(
        lambda *given: inl_dynamics(*given[:-1], given[-1] * 1.0001), operands, weights
    )
    assert max(map(off, found, want)) > BOUND


def test_controlled(controlled_operands, measured_gradients):
    operands, weights, attrs = controlled_operands

    def plain(x, v, mu, controller, dt):
        return BODY["inl_dynamics_n_steps"](x, v, mu, controller, dt=float(dt), **attrs)

    def ours(x, v, mu, controller, dt):
        if attrs["n_steps"] == 1:
            rest = {key: attrs[key] for key in ("most_beta", "limit")}
            return inl_dynamics_step(x, v, mu, controller, dt, **rest)
        return inl_dynamics_n_steps(x, v, mu, controller, dt=dt, **attrs)

    want = measured_gradients(plain, operands, weights)
    found = gradients(ours, operands, weights)
    for name, got, exact in zip(
        ("x", "v", "mu", "controller", "dt"), found, want, strict=True
    ):
        assert off(got, exact) < BOUND, name


def test_results_equal_the_bodies(dynamics_operands):
    operands, _ = dynamics_operands
    found = inl_dynamics(*map(jnp.asarray, operands))
    for got, exact in zip(found, body(*operands), strict=True):
        assert isinstance(got, jax.Array)
        assert off(np.asarray(got), exact) < 1e-14


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_computed_in_float32(dtype):
    operands = jax.random.normal(jax.random.key(3), (6, 4, 9), dtype)
    x, v = inl_dynamics(*operands)
    wide = inl_dynamics(*operands.astype("float32"))
    assert x.dtype == v.dtype == dtype
    assert jnp.array_equal(x, wide[0].astype(dtype))
    assert jnp.array_equal(v, wide[1].astype(dtype))


def test_a_training_step_moves_every_operand():
    def loss(held):
        x, v = inl_dynamics(jnp.ones((2, 3)), jnp.ones((2, 3)), **held)
        return jnp.sum(x**2 + v**2)

    held = {"mu": 0.3, "alpha": 0.9, "beta": 0.2, "gate": 0.5, "dt": 0.1}
    held = {name: jnp.full((), value) for name, value in held.items()}
    slopes = jax.grad(loss)(held)
    assert all(float(slope) != 0 for slope in slopes.values())


def test_steps_by_a_function_of_the_state():
    controller = partial(jnp.full, (2, 12), 0.3)
    x, v = jnp.ones((2, 4)), jnp.zeros((2, 4))
    found = inl_dynamics_n_steps(x, v, 0.5, lambda _x, _v: controller(), 3)
    want = inl_dynamics_n_steps(x, v, 0.5, controller(), 3)
    assert np.allclose(found, want, rtol=1e-13)


def test_block(block_operands, measured_gradients):
    operands, weights = block_operands
    bodies = BodyOps(lambda _spec, result: result)

    def plain(h, velocity, dt, *w):
        return bodies.inl_block(h, velocity, InlBlock(*w), dt=float(dt))

    def ours(h, velocity, dt, *w):
        return inl_block(h, velocity, InlBlock(*w), dt=dt)

    _, velocity, _ = plain(*operands)
    assert 0 < (np.abs(velocity) == 10).sum() < velocity.size
    want = measured_gradients(plain, operands, weights)
    found = gradients(ours, operands, weights)
    names = "h", "velocity", "dt", *InlBlock._fields
    for name, got, exact in zip(names, found, want, strict=False):
        assert off(got, exact) < BOUND, name
