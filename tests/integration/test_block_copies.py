"""Copies of blocks on torch, JAX and ONNX Runtime, and between backends."""

from __future__ import annotations

import numpy as np
import pytest

from inl.spec.message import READ, WRITE, admit_frame, transfer_frame
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.oracle import Tiny
from inl.testing.play import admission, one_step
from inl.testing.runner_frames import some_ids
from inl.testing.target import Target
from vendor_backends import MAKERS


@pytest.fixture(autouse=True)
def platforms(monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", "cpu")


def target(name):
    backend = MAKERS[name]()
    made = Target(backend.device)
    made.__dict__["backend"] = backend
    return made


@pytest.mark.parametrize("name", ["torch", "jax", "onnx"])
def test_the_checks_of_blocks_pass(name):
    checks = checks_of(target(name), ["blocks"])
    if name == "jax":  # each check compiles for a second
        kept = "read/float32/kv int8", "write/float32/kv bfloat16", "slots/float32"
        checks = [check for check in checks if check.name.endswith(kept)]
        assert len(checks) == 3
    assert [r.message for r in (perform(check, {}) for check in checks)] == [""] * len(
        checks
    )


PAIRS = [("torch", "cpu"), ("jax", "torch"), ("cpu", "onnx"), ("onnx", "torch")]


@pytest.mark.parametrize(("source", "other"), PAIRS)
def test_a_sequence_goes_on_at_another_backend(source, other):
    """In float32 the tokens are those of the oracle, after blocks of either."""
    made = [Tiny(target(name), "float32") for name in (source, other)]
    size = 16
    one, two = (
        tiny.runner(block_size=size, max_blocks_per_seq=4, blocks=(26,))
        for tiny in made
    )
    assert one.cache_layout == two.cache_layout
    ids = some_ids(made[0], 37)
    one.submit(admission(one.limits, 1, [1, 2, 3]))
    one.submit(one_step(one.limits, [(1, ids)], step=1, decoding=0))
    answer = [int(one.collect().tokens[0, 0])]
    one.submit(transfer_frame(READ, 0, [1, 2, 3]))
    parts = one.read()
    two.write(transfer_frame(WRITE, 0, [9, 4, 7]), parts)
    two.submit(transfer_frame(READ, 0, [9, 4, 7]))
    again = two.read()
    assert np.array_equal(again["cells"].data, parts["cells"].data)
    two.submit(
        admit_frame(
            2, [[9, 4, 7, 5]], groups=1, max_blocks_per_seq=4, length=37,
            last=answer[0],
        )
    )  # fmt: skip
    for step in range(1, 6):
        two.submit(one_step(two.limits, [(2, [-1])], step=step, decoding=1))
        answer.append(int(two.collect().tokens[0, 0]))
    made[1].judge(ids, answer)  # raises if a token is not the oracle's
    one.close()
    two.close()
