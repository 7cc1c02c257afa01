"""Experts, norms and INL dynamics in the TPU simulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.moe import ExpertLinear
from inl.ops.norm import Norm
from inl.spec.op import Case
from inl.testing.op_call import OpCall
from inl_jax import functional
from inl_jax.pallas import experts, rows
from op_cases import Target
from tpu_simulator import races, require_right, simulated

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


def check(backend, name, dtype, args, attrs, seed):
    spec, case = catalog()[name], Case(name, args, attrs)
    kernels = (*experts.kernels(simulated(seed)), *rows.kernels(simulated(seed)))
    call = OpCall(Target(backend, kernels), spec, case, dtype)
    require_right(call, f"{name}/pallas", seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("tokens", "count"), [(3, 8), (40, 3)])
def test_experts(tpu_backend, tokens, count, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, count, (tokens, 2)).astype(np.int32)
    ids[ids == 1] = 0  # an expert without rows
    w = ExpertLinear(rng.standard_normal((count, 160, 128)))
    x = rng.standard_normal((tokens, 1, 128))
    check(tpu_backend, "expert_linear", "bfloat16", (x, ids, w), {}, seed)


def test_tiles_name_chosen_experts_only():
    """A matrix is read for each change of the expert along the tiles."""
    ids = jnp.asarray([5, 2, 5, 5, 2, 5], jnp.int32)
    tiles = experts.grouped(ids, 8, 2)
    assert set(np.asarray(tiles.experts).tolist()) == {2, 5}
    assert np.count_nonzero(np.diff(tiles.experts)) == 1
    assert int(tiles.used[0]) == 3
    assert np.asarray(tiles.rows)[tiles.places].tolist() == list(range(6))


@pytest.mark.parametrize("seed", SEEDS)
def test_reduce_add_norm(tpu_backend, monkeypatch, seed):
    monkeypatch.setattr(rows, "BLOCK_BYTES", 1 << 16)  # several blocks
    rng = np.random.default_rng(seed)
    residual, delta = rng.standard_normal((2, 37, 256))
    args = (residual, delta, Norm(rng.standard_normal(256)))
    check(tpu_backend, "reduce_add_norm", "bfloat16", args, {"eps": 1e-5}, seed)


ATTRS = {"n_steps": 3, "dt": 0.1, "most_beta": 2.0, "limit": 1.5}


def operands(seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x, v = rng.standard_normal((2, 5, 128)).astype(dtype)
    mu, controller = rng.standard_normal(128), rng.standard_normal((5, 384))
    return x, v, mu.astype(dtype), controller.astype(dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_inl_dynamics(tpu_backend, seed):
    args = operands(seed)
    check(tpu_backend, "inl_dynamics_n_steps", "float32", args, ATTRS, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_inl_gradients_equal_those_of_float64(seed):
    def loss(run, args, **more):
        position, velocity = run(*args, **ATTRS, **more)
        return (position * position + position * velocity).sum()

    args = operands(seed)
    with jax.enable_x64(True):
        wide = [jnp.asarray(each) for each in args]
        exact = jax.grad(lambda a: loss(functional.inl_dynamics_n_steps, a))(wide)
        exact = [np.asarray(each) for each in exact]
    narrow = [jnp.asarray(each, jnp.float32) for each in args]
    run = rows.inl_dynamics_n_steps
    found = jax.grad(lambda a: loss(run, a, interpret=simulated(seed)))(narrow)
    assert not races()
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("module", "args", "reason"),
    [
        (rows, (np.zeros((2, 96), "f4"),), "last axis 96"),
        (rows, (np.zeros((2, 128), "f2"),), "found float16"),
        (
            experts,
            (np.zeros((2, 1, 96), "f4"), 0, ExpertLinear(np.zeros((2, 8, 96)))),
            "96 inputs",
        ),
    ],
)
def test_refusals(module, args, reason):
    assert reason in module.refuse(*args)
