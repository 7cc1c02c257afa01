"""What tests of every tier share: gradients measured, not derived."""

from __future__ import annotations

import numpy as np
import pytest

STEP = 1e-5


def _weighed(function, operands, weights):
    results = function(*operands)
    return sum(float(np.sum(w * r)) for w, r in zip(weights, results, strict=True))


def differences(function, operands, weights):
    """Gradients of ``sum(weights * function(*operands))``: central differences.

    Of the fourth order, in float64: with steps of 1e-5 they are good to about 1e-10.
    """
    found = []
    for place, operand in enumerate(operands):
        gradient = np.zeros(np.shape(operand))
        for index in np.ndindex(gradient.shape):
            values = []
            for steps in (-2, -1, 1, 2):
                moved = np.array(operand, np.float64)
                moved[index] += steps * STEP
                changed = (*operands[:place], moved, *operands[place + 1 :])
                values.append(_weighed(function, changed, weights))
            a, b, c, d = values
            gradient[index] = (a - 8 * b + 8 * c - d) / (12 * STEP)
        found.append(gradient)
    return found


@pytest.fixture(scope="session")
def measured_gradients():
    return differences


FORMS = {
    "full": ((2, 3, 4),) * 6,
    "one for all": ((2, 3, 4), (2, 3, 4), (4,), (4,), (4,), (4,)),
    "leading ones": ((2, 3, 4), (2, 3, 4), (1, 4), (1, 1, 4), (2, 1, 4), (1, 3, 1)),
    "per token": ((2, 3, 4), (1, 3, 4), (2, 3, 1), (3, 1), (2, 1, 1), (2, 3, 1)),
    "scalars": ((2, 3, 4), (), (), (), (), ()),
    "vectors": ((5,), (5,), (1,), (5,), (), (5,)),
}
"""Shapes of x, v, mu, alpha, beta, gate."""


@pytest.fixture(params=FORMS)
def dynamics_operands(request):
    """x, v, mu, alpha, beta, gate, dt in float64, and weights of the two results."""
    rng = np.random.default_rng(sorted(FORMS).index(request.param))
    shapes = FORMS[request.param]
    operands = [np.asarray(rng.standard_normal(shape)) for shape in shapes]
    return (*operands, np.asarray(0.3)), rng.standard_normal((2, *shapes[0]))


CONTROLLED = {
    "one step": (1, None, None, ()),
    "shared controller": (1, None, None, (1,)),
    "clamped": (1, 0.7, 0.6, ()),
    "three steps": (3, None, None, ()),
    "three steps, clamped": (3, 0.7, 0.6, (2,)),
    "no step": (0, None, None, ()),
}


@pytest.fixture(params=CONTROLLED)
def controlled_operands(request):
    """x, v, mu, controller, dt; weights of the results; attributes of the op."""
    n_steps, most_beta, limit, lead = CONTROLLED[request.param]
    rng = np.random.default_rng(7)
    x, v = rng.standard_normal((2, 2, 5))
    controller = rng.standard_normal((*(lead or (2,)), 15))
    operands = x, v, rng.standard_normal(5), controller, np.asarray(0.2)
    attrs = {"n_steps": n_steps, "most_beta": most_beta, "limit": limit}
    return operands, rng.standard_normal((2, 2, 5)), attrs
