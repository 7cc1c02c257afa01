"""INL dynamics and experts under JAX's transformations and on sharded arrays."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'jax[cpu]'")
jnp = jax.numpy

# After the skip where JAX is not installed.
from jax.test_util import check_grads  # noqa: E402

from inl import inl_dynamics_n_steps, moe, nn  # noqa: E402
from inl.errors import RequestError  # noqa: E402


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def dynamics_loss(x, v, controller):
    clamps = {"most_beta": 1.2, "limit": 0.8}
    x, v = inl_dynamics_n_steps(x, v, 0.3, controller, 2, **clamps)
    return (x * x * x + v * x).sum()


def layer_loss(params, h):
    x, v, mu = nn.inl_dynamics_layer(params, h, 3 * h)
    return (x * x * v + mu).sum()


def mixture_loss(x, logits, experts):
    y = moe.moe_dispatch(x, logits, experts, k=2, capacity_factor=0.8)
    return (y * y).sum() + moe.load_balance_loss(logits, k=2)


def layer_operands():
    key, kind = jax.random.key(0), jnp.float64
    return nn.init_inl_dynamics(key, 2, controller=2, dtype=kind), normal(1, 1, 2)


def dynamics_operands():
    return normal(1, 2, 3), normal(2, 2, 3), normal(3, 9)


def mixture_operands():
    return normal(1, 4, 2), normal(2, 4, 3), normal(3, 3, 2, 2)


LOSSES = {
    "dynamics": (dynamics_loss, dynamics_operands),
    "layer": (layer_loss, layer_operands),
    "mixture": (mixture_loss, mixture_operands),
}


def near(found, want):
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_equal_finite_differences_in_both_modes(name):
    """Of first and second order, by reverse and (but for experts) forward mode."""
    loss, make = LOSSES[name]
    modes = ["rev"] if name == "mixture" else ["rev", "fwd"]
    bound = 1e-3 if name == "mixture" else 1e-5  # experts add in float32
    check_grads(jax.jit(loss), make(), 2, modes, atol=bound, rtol=bound)


@pytest.mark.parametrize("name", LOSSES)
def test_checkpoint_and_vmap_equal_plain_calls(name):
    loss, make = LOSSES[name]
    operands = make()
    every = tuple(range(len(operands)))
    gradient = jax.jit(jax.grad(loss, argnums=every))
    want = gradient(*operands)
    assert all(float(jnp.abs(each).max()) > 1e-6 for each in jax.tree.leaves(want))
    near(jax.jit(jax.grad(jax.checkpoint(loss), argnums=every))(*operands), want)
    batch = jax.tree.map(lambda x: jnp.stack([x, -2 * x, x * x]), operands)
    found = jax.jit(jax.vmap(gradient))(*batch)
    for index in range(3):
        one = jax.tree.map(lambda x, i=index: x[i], batch)
        near(jax.tree.map(lambda x, i=index: x[i], found), gradient(*one))


def test_the_layer_equals_that_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    layer = nn.InlDynamics(6, controller=4).double()
    state = {name: each.detach().numpy() for name, each in layer.named_parameters()}
    params = nn.init_inl_dynamics(jax.random.key(0), 6, controller=4)
    order = [
        "mu",
        *("controller_in.weight", "controller_in.bias"),
        *("controller_out.weight", "controller_out.bias"),
        "mu_proj.weight",
    ]
    assert [each.shape for each in params] == [state[name].shape for name in order]
    for name, each in zip(order, params, strict=True):
        spread = np.abs(state[name]).max()
        assert np.isclose(np.abs(each).max(), spread, rtol=0.5), name
    h, v = np.random.default_rng(0).standard_normal((2, 5, 6))
    own = type(params)(*(jnp.asarray(state[name]) for name in order))
    found = nn.inl_dynamics_layer(own, jnp.asarray(h), jnp.asarray(v))
    want = layer(torch.tensor(h), torch.tensor(v))
    near(found, [each.detach().numpy() for each in want])


def test_sizes_below_1_are_refused():
    with pytest.raises(RequestError, match="controller: found 0"):
        nn.init_inl_dynamics(jax.random.key(0), 6, controller=0)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from inl import moe, nn
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
params = nn.init_inl_dynamics(jax.random.key(0), 8, controller=4)
h, logits = jax.random.normal(jax.random.key(1), (2, 16, 8))
experts = jax.random.normal(jax.random.key(2), (8, 8, 8))
def loss(params, experts, h, logits):
    h, v, mu = nn.inl_dynamics_layer(params, h)
    y = moe.moe_dispatch(h, logits, experts, k=2, capacity_factor=0.8)
    return (y * y + v * mu).mean(), (h, y)
step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
want = step(params, experts, h, logits)
rows = put(h, "data"), put(logits, "data")
with jax.transfer_guard("disallow"):
    found = step(jax.tree.map(put, params), put(experts, "model"), *rows)
for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
(_, (moved, _)), (_, d_experts, d_h) = found
assert len(moved.sharding.device_set) == len(d_h.sharding.device_set) == 8
assert moved.sharding.spec[0] == d_h.sharding.spec[0] == "data", moved.sharding
plain = nn.inl_dynamics_layer(jax.tree.map(put, params), rows[0])[0]
assert plain.sharding.spec[0] == "data", plain.sharding
print("sharded")
"""


def test_arrays_sharded_over_eight_devices_stay_there():
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "sharded\n", done.stderr[-3000:]
