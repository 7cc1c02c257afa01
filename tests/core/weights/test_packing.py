"""What ``pack`` functions share: types in a layout, packers, refusals of dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from inl.dtypes import wrap
from inl.ops.linear import Linear, QkvLinear
from inl.spec.kernel import PLAIN
from inl.spec.op import Spec
from inl.spec.selection import layout_of
from inl.spec.tree import tree_map
from inl.spec.weights import in_layout
from inl.weights.packing import packer, refuse_dtypes


class Host:
    def tensor(self, array):
        return array.data


def reversed_matrix(array, backend, dtype):
    assert isinstance(backend, Host)
    return array.data[::-1], dtype


def test_a_type_in_a_layout_is_the_tuple_with_a_layout():
    tiled = in_layout("tiles")(Linear)
    w = tiled("matrix", bias="bias")
    assert w == Linear("matrix", "bias")
    assert (layout_of(w), layout_of(Linear("matrix"))) == ("tiles", PLAIN)
    for other in (w._replace(bias=None), tree_map(str.upper, w)):
        assert type(other) is tiled
    with pytest.raises(AttributeError):
        w.other = 1


def test_equal_layouts_of_one_tuple_are_one_type():
    assert in_layout("tiles")(Linear) is in_layout("tiles")(Linear)
    assert in_layout("tiles")(Linear) is not in_layout("rows")(Linear)
    assert in_layout("tiles")(Linear) is not in_layout("tiles")(QkvLinear)


def test_it_decorates_a_tuple_of_a_kernel_s_own():
    @in_layout("stacked")
    class Stacked(NamedTuple):
        """All in one."""

        weight: Any

    assert (Stacked.__name__, Stacked.__doc__) == ("Stacked", "All in one.")
    assert layout_of(Stacked(1)) == "stacked"
    # One kernel's tuple may be another's, in its layout.
    assert layout_of(in_layout("rows")(Stacked)(1)) == "rows"


def test_a_packer_packs_matrices_and_converts_vectors():
    parts = {
        name: np.random.default_rng(size).standard_normal((size, 3), np.float32)
        for name, size in (("q", 4), ("k", 2), ("v", 2))
    }
    bias = np.array([1.5, -2.0], np.float64)
    group = {**{name: wrap(part) for name, part in parts.items()}, "k_bias": wrap(bias)}
    w = packer("qkv_linear", "reversed", reversed_matrix)(
        {**group, "q_bias": None}, Host(), "float32"
    )
    assert (layout_of(w), w.q_bias, w.v_bias) == ("reversed", None, None)
    for name, part in parts.items():
        packed, dtype = getattr(w, name)
        assert dtype == "float32"
        np.testing.assert_array_equal(packed, part[::-1])
    assert w.k_bias.dtype == np.float32
    np.testing.assert_array_equal(w.k_bias, bias)


def test_other_dtypes_of_matrices_are_refused():
    refuse = refuse_dtypes("q4_0", "q8_0")
    matrix, bias = Spec((4, 32), "q4_0"), Spec((4,), "float32")
    assert refuse(weight=matrix, bias=bias) is None
    assert refuse(weight=matrix, up=Spec((4, 32), "q6_k")) == (
        "up is stored as q6_k, not as q4_0, q8_0"
    )
