"""Gradients of ``inl.Tensor`` against central differences of a formula in float64."""

from __future__ import annotations

import numpy as np

from inl import Tensor

REFERENCE = "reference"


def differences(formula, operands, step=1e-6):
    """Central differences of ``formula`` in float64, for every operand."""
    gradients = []
    for index, operand in enumerate(operands):
        gradient = np.zeros_like(operand)
        for place in np.ndindex(operand.shape):
            values = [np.array(each) for each in operands]
            values[index][place] += step
            above = formula(*values)
            values[index][place] -= 2 * step
            gradient[place] = (above - formula(*values)) / (2 * step)
        gradients.append(gradient)
    return gradients


def found_gradients(function, operands, device=REFERENCE):
    leaves = [Tensor(each, device, requires_grad=True) for each in operands]
    function(*leaves).backward()
    return [leaf.grad.numpy() for leaf in leaves]


def check(function, formula, *operands, device=REFERENCE):
    """Compare the gradients of ``function``, of tensors, with those of ``formula``."""
    for found, exact in zip(
        found_gradients(function, operands, device),
        differences(formula, operands),
        strict=True,
    ):
        assert found.shape == exact.shape
        assert np.allclose(found, exact, rtol=2e-4, atol=2e-5)
