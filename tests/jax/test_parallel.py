"""``apply_parallelism`` of JAX parameters on eight host devices, against one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest

from inl.errors import RequestError
from inl.optimizers import apply_parallelism, get_optimal_parallelism

PLAN = get_optimal_parallelism(
    model_size_params=10**6, num_devices=1, memory_per_device_gb=10
)

RUN = """
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from inl.optimizers import apply_parallelism, get_optimal_parallelism
one = get_optimal_parallelism(
    model_size_params=10**6, num_devices=1, memory_per_device_gb=10
)
keys = jax.random.split(jax.random.key(0), 4)
params = {"in": jax.random.normal(keys[0], (8, 16)), "bias": jnp.ones(16),
          "out": jax.random.normal(keys[1], (16, 3))}
x, y = jax.random.normal(keys[2], (8, 8)), jax.random.normal(keys[3], (8, 3))

@jax.jit
def step(p, x, y):
    def loss(p):
        return jnp.square(jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] - y).mean()
    value, grads = jax.value_and_grad(loss)(p)
    return value, jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)

divided = apply_parallelism(params, replace(one, data_parallel=4, tensor_parallel=2))
assert divided.mesh.shape == {"data": 4, "tensor": 2}
held = {name: p.addressable_shards[0].data.shape
        for name, p in divided.parameters.items()}
# 2 divides the columns of "in" but not those of "out".
assert held == {"in": (8, 8), "bias": (16,), "out": (16, 3)}, held
own = divided.parameters
rows = jax.device_put((x, y), divided.batch)
assert rows[0].addressable_shards[0].data.shape == (2, 8)
wrong = rows[0] * 1.01, rows[1]
for _ in range(3):
    want, params = step(params, x, y)
    off = step(own, *wrong)[0]
    got, own = step(own, *rows)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert abs(off - want) > 1e-4 * abs(want)
    for name in params:
        np.testing.assert_allclose(own[name], params[name], rtol=1e-4, atol=1e-5)
print("equal")
"""


def test_training_on_a_mesh_equals_one_device():
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr[-3000:]


def test_refusals():

    for model, sizes, text in (
        ({"w": jnp.ones((2, 2))}, {"pipeline_parallel": 2}, "pipeline_parallel=2"),
        ({"w": jnp.ones((2, 2))}, {"expert_parallel": 2}, "expert_parallel=2"),
        ({"w": jnp.ones((2, 2))}, {"data_parallel": 64}, "accepted: at least 64"),
        ({"w": "text"}, {}, "found dict"),
        (None, {}, "found NoneType"),
    ):
        with pytest.raises(RequestError, match=text):
            apply_parallelism(model, replace(PLAN, **sizes))
