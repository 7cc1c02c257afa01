"""Gradients by finite differences, and operands of the differentiable functions."""

from __future__ import annotations

import numpy as np

STEP = 1e-5


def _weighted_sum(function, operands, weights):
    results = function(*operands)
    return sum(float(np.sum(w * r)) for w, r in zip(weights, results, strict=True))


def _partial(function, operands, weights, operand, index):
    """One partial derivative: fourth-order central difference."""
    values = []
    for steps in (-2, -1, 1, 2):
        shifted = np.array(operands[operand], np.float64)
        shifted[index] += steps * STEP
        changed = (*operands[:operand], shifted, *operands[operand + 1 :])
        values.append(_weighted_sum(function, changed, weights))
    a, b, c, d = values
    return (a - 8 * b + 8 * c - d) / (12 * STEP)


def finite_differences(function, operands, weights):
    """Gradients of ``sum(weights * function(*operands))``, one per operand.

    Computed in float64 with steps of 1e-5; the error is about 1e-10.
    """
    gradients = []
    for operand, value in enumerate(operands):
        gradient = np.zeros(np.shape(value))
        for index in np.ndindex(gradient.shape):
            gradient[index] = _partial(function, operands, weights, operand, index)
        gradients.append(gradient)
    return gradients


FORMS = {
    "full": ((2, 3, 4),) * 6,
    "one for all": ((2, 3, 4), (2, 3, 4), (4,), (4,), (4,), (4,)),
    "leading ones": ((2, 3, 4), (2, 3, 4), (1, 4), (1, 1, 4), (2, 1, 4), (1, 3, 1)),
    "per token": ((2, 3, 4), (1, 3, 4), (2, 3, 1), (3, 1), (2, 1, 1), (2, 3, 1)),
    "scalars": ((2, 3, 4), (), (), (), (), ()),
    "vectors": ((5,), (5,), (1,), (5,), (), (5,)),
}
"""Shapes of x, v, mu, alpha, beta, gate."""


def dynamics(form):
    """x, v, mu, alpha, beta, gate, dt in float64, and weights of the two results."""
    rng = np.random.default_rng(sorted(FORMS).index(form))
    shapes = FORMS[form]
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
"""Number of steps, upper bound of beta, velocity limit, lead of the controller."""


def controlled(case):
    """x, v, mu, controller, dt; weights of the results; attributes of the op."""
    n_steps, most_beta, limit, lead = CONTROLLED[case]
    rng = np.random.default_rng(7)
    x, v = rng.standard_normal((2, 2, 5))
    controller = rng.standard_normal((*(lead or (2,)), 15))
    operands = x, v, rng.standard_normal(5), controller, np.asarray(0.2)
    attrs = {"n_steps": n_steps, "most_beta": most_beta, "limit": limit}
    return operands, rng.standard_normal((2, 2, 5)), attrs


BLOCKS = ("moving mu", "still mu")


def block(case):
    """h, velocity, dt and the weights of a block in float64; weights of its results.

    Some betas and velocities are beyond their clamps, none close to them.
    """
    rng = np.random.default_rng(4)
    hidden, inner = 4, 3
    h, velocity = rng.standard_normal((2, 2, hidden))
    shapes = (hidden,), (inner, 2 * hidden), (inner,), (3 * hidden, inner), (12,)
    mu, *rest = (rng.standard_normal(shape) for shape in shapes)
    w = [np.array([30.0, 0.3, -30.0, 1.0]) + mu, *(2 * each for each in rest)]
    if case == "moving mu":
        w.append(rng.standard_normal((hidden, hidden)))
    return (h, velocity, np.asarray(0.2), *w), rng.standard_normal((3, 2, hidden))
