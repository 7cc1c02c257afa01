"""Rotation of prompts in the TPU simulator."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inl.ops import catalog
from inl.spec.op import Case
from inl.testing.op_call import OpCall
from inl_jax.pallas import rope
from op_cases import Target
from tpu_simulator import require_right, simulated


def check(backend, monkeypatch, tokens, dtype="bfloat16"):
    monkeypatch.setattr(rope, "TOKENS", 32)
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((tokens, heads, 128)) for heads in (6, 2))
    angles = rng.uniform(-3, 3, (tokens, 64))
    case = Case("rows", (q, k, np.cos(angles), np.sin(angles)), {})
    target = Target(backend, [rope.kernel(simulated())])
    call = OpCall(target, catalog()["rope"], case, dtype)
    require_right(call, "rope/pallas")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heads_equal_the_float64_body(tpu_backend, monkeypatch, dtype):
    """The last block of tokens is partial."""
    check(tpu_backend, monkeypatch, 70, dtype)


def test_a_wrong_half_is_found(tpu_backend, monkeypatch):
    roll = rope.pltpu.roll
    monkeypatch.setattr(rope.pltpu, "roll", lambda x, by, axis: roll(x, by - 1, axis))
    with pytest.raises(Exception, match="rope/pallas"):
        check(tpu_backend, monkeypatch, 60)  # not traced before


@pytest.mark.parametrize(
    ("tokens", "dim", "rotated", "reason"),
    [
        (2048, 128, 128, None),
        (64, 128, 128, "256 tokens"),
        (2048, 64, 64, "heads of 128"),
        (2048, 128, 64, "heads of 128"),
    ],
)
def test_other_calls_are_refused(tokens, dim, rotated, reason):
    q = jax.ShapeDtypeStruct((tokens, 4, dim), "bfloat16")
    table = jax.ShapeDtypeStruct((tokens, rotated // 2), "float32")
    found = rope.refuse(q, q, table, table)
    assert bool(found) == bool(reason)
    assert (reason or "") in (found or "")
