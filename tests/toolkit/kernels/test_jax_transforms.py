"""Kernels under the transformations of JAX, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from inl.kernels import flash_attention, gemm
from inl.kernels.tpu import compile_tpu_kernel

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture
def rng():
    return np.random.default_rng(12)


def test_a_compiled_kernel_is_a_part_of_programs(rng):
    x, w = (rng.standard_normal((4, 4)).astype(np.float32) for _ in "xw")
    kernel = compile_tpu_kernel(
        name="smooth", fn=lambda x, w: jnp.tanh(x @ w), input_shapes=[(4, 4)] * 2,
        output_shapes=[(4, 4)], input_dtypes=[jnp.float32] * 2,
        output_dtypes=[jnp.float32],
    )  # fmt: skip
    x64, w64 = x.astype(float), w.astype(float)
    y = np.tanh(x64 @ w64)
    assert np.abs(kernel(x, w) - y).max() < 1e-6
    assert np.abs(jax.jit(lambda x, w: kernel(x, w) + 1)(x, w) - y - 1).max() < 1e-6
    slope = jax.grad(lambda w: kernel(x, w).sum())(w)
    assert np.abs(slope - x64.T @ (1 - y**2)).max() < 1e-5
    many = jax.vmap(kernel, (0, None))(np.stack([x, 2 * x]), w)
    assert np.abs(many[1] - np.tanh(2 * x64 @ w64)).max() < 1e-6


def test_operations_of_a_program_have_the_names_of_kernels(rng):
    x = jnp.asarray(rng.standard_normal((1, 2, 8, 4)), jnp.float32)

    def layer(x):
        return gemm(flash_attention(x, x, x), jnp.swapaxes(x, -1, -2))

    text = jax.jit(layer).lower(x).as_text(debug_info=True)
    assert "attention/tiled" in text
    assert "gemm/default" in text
