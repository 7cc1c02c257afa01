"""``inl_dynamics`` on NumPy arrays: equations and errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from inl import (
    get_backend,
    inl_dynamics,
    inl_dynamics_n_steps,
    inl_dynamics_step,
    set_backend,
)
from inl.device import Device
from inl.errors import MissingPackage, PluginError, RequestError
from inl.ops import catalog
from inl.ops.inl_functions import inl_dynamics_backward
from inl.plugin import choose_device, load_registry
from inl.plugin.contribution import Contribution, FunctionsEntry
from inl.spec.functions import Functions

RNG = np.random.default_rng(11)


def test_inl_dynamics_is_the_equation(dynamics_operands):
    (*operands, _), _ = dynamics_operands
    x, v, mu, alpha, beta, gate = operands
    moved, velocity = inl_dynamics(*operands, dt=0.3)
    assert np.allclose(velocity, alpha * v - beta * (x - mu), rtol=1e-15, atol=1e-15)
    assert np.allclose(moved, x + 0.3 * gate * velocity, rtol=1e-15, atol=1e-15)
    assert moved.dtype == velocity.dtype == np.float64


def test_a_closed_gate_keeps_the_position():
    x, v = RNG.standard_normal((2, 3, 5))
    moved, velocity = inl_dynamics(x, v, 0.2, 0.9, 0.4, 0.0)
    assert np.array_equal(moved, x)
    assert not np.array_equal(velocity, v)


def test_zero_velocity_at_mu_is_a_fixed_point():
    x = RNG.standard_normal((3, 5))
    v = np.zeros_like(x)
    found = inl_dynamics_n_steps(x, v, x, RNG.standard_normal((3, 15)), 9)
    assert np.array_equal(found, (x, v))


def test_the_map_has_determinant_alpha():
    alpha, beta, gate, dt = 0.8, 0.6, 0.7, 0.25
    columns = [
        inl_dynamics(np.array([a]), np.array([b]), 0.0, alpha, beta, gate, dt)
        for a, b in ((1.0, 0.0), (0.0, 1.0))
    ]
    matrix = np.array(columns)[:, :, 0].T
    pull = dt * gate
    want = [[1 - pull * beta, pull * alpha], [-beta, alpha]]
    assert np.allclose(matrix, want, rtol=1e-15)
    assert np.isclose(np.linalg.det(matrix), alpha, rtol=1e-14)


@pytest.mark.parametrize(("share", "stable"), [(0.98, True), (1.02, False)])
def test_it_is_stable_up_to_the_bound(share, stable):
    alpha, gate, dt = 0.6, 0.5, 0.4
    beta = share * 2 * (1 + alpha) / (dt * gate)
    x, v = np.array([1.0]), np.array([0.0])
    for _ in range(2000):
        x, v = inl_dynamics(x, v, 0.0, alpha, beta, gate, dt)
    assert bool(abs(x[0]) < 1e-3) is stable


def test_n_steps_equals_single_steps():
    x, v, mu = RNG.standard_normal((3, 4, 6))
    controller = RNG.standard_normal((4, 18))
    clamps = {"most_beta": 0.8, "limit": 0.9}
    want = x, v
    for _ in range(4):
        want = inl_dynamics_step(*want, mu, controller, 0.2, **clamps)
    found = inl_dynamics_n_steps(x, v, mu, controller, 4, 0.2, **clamps)
    assert np.allclose(found, want, rtol=1e-13)
    by_call = inl_dynamics_n_steps(x, v, mu, lambda *_: controller, 4, 0.2, **clamps)
    assert np.array_equal(by_call, want)


def test_a_controller_may_be_a_function_of_the_state():
    x, v = RNG.standard_normal((2, 4, 6))
    seen = []

    def controller(x, v):
        seen.append((x, v))
        return np.concatenate([x, v, x - v], -1)

    found = inl_dynamics_n_steps(x, v, 0.1, controller, 2)
    assert np.array_equal(seen[0], (x, v))
    assert not np.array_equal(seen[1], (x, v))
    first = inl_dynamics_step(x, v, 0.1, controller(x, v))
    assert np.array_equal(found, inl_dynamics_step(*first, 0.1, controller(*first)))


def test_half_types_are_computed_in_float32():
    x, v, mu = RNG.standard_normal((3, 4, 8)).astype(np.float16)
    moved, velocity = inl_dynamics(x, v, mu, 0.9, 0.3, 0.7)
    wide = inl_dynamics(
        *(each.astype(np.float32) for each in (x, v, mu)), 0.9, 0.3, 0.7
    )
    assert moved.dtype == velocity.dtype == np.float16
    assert np.array_equal(moved, wide[0].astype(np.float16))
    assert np.array_equal(velocity, wide[1].astype(np.float16))


def test_activations_are_precise_far_from_zero():
    controller = np.array([[-800.0, 800.0, -800.0, 800.0, -800.0, 800.0]])
    x = np.array([[1.0, 2.0]])
    with np.errstate(all="raise", under="ignore"):
        moved, velocity = inl_dynamics_step(x, x, 0.0, controller)
    assert np.isfinite([moved, velocity]).all()
    assert velocity.tolist() == [[0.0, 2.0 - 800.0 * 2.0]]


def test_gradients_of_broadcast_operands_are_sums(
    dynamics_operands, measured_gradients
):
    (*operands, dt), weights = dynamics_operands
    body = catalog()["inl_dynamics"].body

    def plain(*given):
        return body(*given[:-1], dt=float(given[-1]))

    want = measured_gradients(plain, (*operands, dt), weights)
    found = inl_dynamics_backward(*weights, *operands, dt=float(dt))
    for got, exact in zip(found, want, strict=True):
        assert np.shape(got) == exact.shape
        assert np.abs(got - exact).max() < 1e-6 * max(np.abs(exact).max(), 1e-3)


X = np.zeros((2, 4))
REFUSED = {
    "mu is wider": (
        lambda: inl_dynamics(X, X, np.zeros(3), 0.9, 0.1, 0.5),
        r"inl_dynamics: mu: found shape \[3\], accepted: one that broadcasts to x "
        r"\[2, 4\]",
    ),
    "v has more rows": (
        lambda: inl_dynamics(X, np.zeros((3, 4)), 0.0, 0.9, 0.1, 0.5),
        r"v: found shape \[3, 4\]",
    ),
    "gate has more axes": (
        lambda: inl_dynamics(X, X, 0.0, 0.9, 0.1, np.zeros((1, 2, 4))),
        r"gate: found shape \[1, 2, 4\]",
    ),
    "dt is a row": (
        lambda: inl_dynamics(X, X, 0.0, 0.9, 0.1, 0.5, np.zeros(4)),
        r"dt: found shape \[4\]",
    ),
    "x is a number": (
        lambda: inl_dynamics(1.0, X, 0.0, 0.9, 0.1, 0.5),
        "x: found float, accepted: an array of jax, numpy, torch$",
    ),
    "mu is text": (
        lambda: inl_dynamics(X, X, "0", 0.9, 0.1, 0.5),
        "mu: found str, accepted: an array of jax, numpy, torch, or a number",
    ),
    "x counts": (
        lambda: inl_dynamics(np.zeros(3, int), X, 0.0, 0.9, 0.1, 0.5),
        "x: found int64, accepted: floating-point numbers",
    ),
    "the controller is no three": (
        lambda: inl_dynamics_step(X, X, 0.0, np.zeros((2, 8))),
        r"controller: found shape \[2, 8\], accepted: \[..., 12\]",
    ),
    "steps are counted": (
        lambda: inl_dynamics_n_steps(X, X, 0.0, np.zeros((2, 12)), -1),
        "n_steps: found -1, accepted: 0 or more",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_operands_are_refused(case):
    call, sentence = REFUSED[case]
    with pytest.raises(RequestError, match=sentence):
        call()


@pytest.fixture
def auto():
    yield
    set_backend("auto")


def test_the_default_backend_is_what_was_detected(auto):
    assert get_backend() == str(choose_device("auto").type)
    assert Device(get_backend()).is_available()
    assert get_backend(X) == "numpy"
    set_backend("numpy")
    assert get_backend() == "numpy"


def test_a_device_name_is_not_a_framework():
    with pytest.raises(RequestError, match="found 'cuda', accepted: auto, jax, numpy"):
        set_backend("cuda")


def test_a_framework_that_is_not_installed_is_an_instruction(monkeypatch, auto):
    monkeypatch.setattr("inl_toolkit.functional.dynamics._functions", {})
    monkeypatch.setitem(sys.modules, "inl_torch", None)
    monkeypatch.setitem(sys.modules, "inl_torch.functional", None)
    with pytest.raises(MissingPackage, match=r"pip install .*inl-torch"):
        set_backend("torch")
    assert get_backend(X) == "numpy"


def test_a_plugin_may_register_a_framework():
    known = load_registry((), ())
    assert known.frameworks() == {
        "numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax",
    }  # fmt: skip
    assert isinstance(known.functions("numpy"), Functions)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("a-b", "m:F"), "found the|functions: found 'a-b'"),
        (("acme", "no target"), "functions for acme: found 'no target'"),
        (("acme", "m:F", ("a.b",)), "functions: found 'a.b'"),
    ],
)
def test_invalid_functions_raise(given, sentence):
    with pytest.raises(PluginError, match=sentence):
        Contribution(None).register_functions(*given)


def test_functions_are_registered_once():
    offer = Contribution(None)
    offer.register_functions("acme", "m:F")
    assert offer.functions == {"acme": FunctionsEntry("m:F", ("acme",))}
    with pytest.raises(PluginError, match="functions for acme: registered twice"):
        offer.register_functions("acme", "m:G")
