"""xIELU against its formula, with an exponential."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.ops import catalog
from inl.ops.xielu import Xielu
from inl.spec.dispatch import DynamicOps


def formula(x, positive, negative, slope):
    bent = np.where(x > 0, positive * x * x, negative * (np.expm1(x) - x))
    return bent + slope * x


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-14), ("float32", 1e-6)])
def test_values_are_those_of_the_formula(dtype, bound):
    backend = ReferenceBackend(Device("reference:0"), dtype=dtype)
    ops = DynamicOps(backend.kernels())
    x = np.concatenate([np.linspace(-12, 12, 999), [-1e30, -1e5, -1e-3, 0.0, 1e-3]])
    numbers = 0.7, 1.3, 0.4
    w = Xielu(*(np.array([each], dtype) for each in numbers))
    found = ops.xielu(x.astype(dtype)[None], w)[0]
    with np.errstate(over="ignore"):
        wanted = formula(x, *numbers)
    assert (np.abs(found - wanted) / (1 + np.abs(wanted))).max() < bound


def test_the_body_is_composed_of_ops_that_every_backend_has():
    spec = catalog()["xielu"]
    assert spec.composite
    assert spec.since == (2, 1)
