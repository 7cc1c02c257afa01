"""``inl check`` compares what a capability says of caches with what they take."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.base import CacheBytes, Traits
from inl.backend.simple import zeroed_state
from inl.backend.state_bytes import block_bytes, state_bytes
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.plugin import simple_backend
from inl.spec.cache import Paged
from inl.spec.limits import Limits
from inl.spec.selection import KernelSelection
from inl.testing.backend_checks import backend_checks
from inl.testing.check import perform
from inl.testing.target import Target

PADDED = 32


def state(spec, limits):
    """Caches whose rows are padded to 32 numbers."""

    def zeros(shape, dtype):
        return np.zeros(shape, np.int32 if dtype == "int32" else np.float32)

    def cache(group, _layer, blocks):
        return zeros((blocks, limits.block_size, 2 * group.kv_heads, PADDED), "float32")

    return zeroed_state(spec, limits, zeros, cache=cache)


def padded_bytes(group, block_size):
    return block_size * 2 * group.kv_heads * PADDED * 4


def failure(block_bytes):
    """Message of the check of the layout, with such a capability."""
    make = simple_backend(
        tensor=lambda host: np.array(widen(host)), numpy=wrap, kernels=lambda: (),
        state=state, traits=Traits(dtypes=("float32",)),
        capabilities=[CacheBytes(block_bytes)],
    )  # fmt: skip
    target = Target(Device("reference:0"))
    vars(target).update(backend=make(target.device), selection=KernelSelection(()))
    (check,) = [c for c in backend_checks(target) if c.name.startswith("backend/layo")]
    return perform(check, {}).message


def test_the_right_bytes_pass():
    assert failure(padded_bytes) == ""


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda group, size: group.token_bytes * size, "found 9216, a block of 16"),
        (lambda *args: padded_bytes(*args) + 4, "found 12292, a block of 16"),
        (lambda *_: 0, "found 0, accepted: bytes, from 1"),
        (lambda *_: 12288.0, "found 12288.0, accepted: bytes, from 1"),
    ],
)
def test_wrong_bytes_are_named(wrong, found):
    message = failure(wrong)
    assert message.startswith("CacheBytes.block_bytes(float32): ")
    assert found in message


def test_a_layout_counts_in_the_bytes_of_a_state():
    group = Paged((0, 1), 3, 24, "float32")
    layout = CacheBytes(padded_bytes)
    assert block_bytes(group, 16) == 2 * 16 * 2 * 3 * 24 * 4
    assert block_bytes(group, 16, layout) == 2 * 16 * 2 * 3 * PADDED * 4
    limits = Limits(slots=2, blocks=(5,), block_size=16, max_blocks_per_seq=2, vocab=5)
    more = state_bytes((group,), limits, layout) - state_bytes((group,), limits)
    assert more == 5 * 2 * 16 * 2 * 3 * (PADDED - 24) * 4
