"""Mixture-of-experts functions on JAX arrays: on the device, under transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inl.errors import RequestError
from inl.functional import moe

T, E, H, INNER, K = 6, 4, 8, 5, 2


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    x, logits = rng.standard_normal((T, H)), rng.standard_normal((T, E))
    shapes = ((E, INNER, H), (E, INNER, H), (E, H, INNER))
    return x, logits, tuple(rng.standard_normal(shape) for shape in shapes)


def dispatch(x, logits, weights):
    return moe.moe_dispatch(x, logits, weights, k=K)


def narrow(operands):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), operands)


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_equals_numpy_under_jit_without_the_host(operands):
    program = jax.jit(dispatch)
    near(program(*narrow(operands)), dispatch(*operands))
    assert "callback" not in program.lower(*narrow(operands)).as_text()


def test_vmap_equals_one_call_per_batch(operands):
    x, logits, weights = operands
    xs, rows = np.stack([x, 2 * x, -x]), np.stack([logits, -logits, 2 * logits])
    found = jax.vmap(dispatch, in_axes=(0, 0, None))(*narrow((xs, rows, weights)))
    calls = [dispatch(one, other, weights) for one, other in zip(xs, rows, strict=True)]
    near(found, np.stack(calls))


@pytest.mark.parametrize("batched", [False, True])
def test_gradients_equal_finite_differences(operands, batched):
    rng = np.random.default_rng(1)

    def loss(*args):
        if batched:
            args = jax.tree.map(lambda x: x[None], args)
            return jax.vmap(dispatch)(*args).sum()
        return dispatch(*args).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*narrow(operands))
    way = jax.tree.map(lambda x: rng.standard_normal(x.shape), operands)

    def moved(step):
        return dispatch(*jax.tree.map(lambda x, d: x + step * d, operands, way)).sum()

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(way), strict=True)
    found = sum((np.asarray(gradient) * d).sum() for gradient, d in pairs)
    np.testing.assert_allclose(found, slope, rtol=1e-4)


def test_concrete_arrays_are_still_validated(operands):
    x, logits, weights = narrow(operands)
    with pytest.raises(RequestError, match="found NaN in row 1"):
        dispatch(x, logits.at[1, 2].set(jnp.nan), weights)
    ids = jnp.full((T, K), E, jnp.int32)
    with pytest.raises(RequestError, match="an id is outside 0 to 3"):
        moe.experts(x, ids, jnp.ones((T, K)), weights)
