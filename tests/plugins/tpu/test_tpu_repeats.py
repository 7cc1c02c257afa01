"""Repeated steps as one XLA program give the tokens of single steps."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models.llama import MODEL
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from repeated_answers import answers

VOCAB, STEPS = 96, 6
# The longest needs the program that the others use too: each takes seconds to compile.
REQUESTS = [
    {"temperature": 0.0, "max_tokens": 16},
    {"temperature": 0.8, "max_tokens": 25, "seed": 1},
    {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True},
    {"temperature": 0.8, "max_tokens": 40, "seed": 2, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def files():
    tiny = tiny_llama(np.random.default_rng(11), vocab=VOCAB, layers=1)
    return MemoryCheckpoint(*tiny)


def served(backend, files, steps, blocks, cancel=None):
    """Outputs of all requests, how often steps were repeated, and preemptions."""
    limits = Limits(
        4, (blocks,), 4, 16, VOCAB, sampler="sample", token_budget=16,
        decode_steps=steps,
    )  # fmt: skip
    runner = local_runner(backend, MODEL, files, limits)
    requests = [
        Request([at, 3, 4, 9], **options) for at, options in enumerate(REQUESTS)
    ]
    found, seen, core = answers(runner, requests, steps, range(50, 54), cancel=cancel)
    return found, [record.bucket.repeat for record in seen], core.scheduler.preemptions


def test_tokens_are_those_of_single_steps(tpu_backend, files):
    reference = ReferenceBackend(Device("reference:0"), dtype="float64")
    plain, repeats, _ = served(reference, files, 1, 40)
    assert set(repeats) == {1}
    assert [reason for _, reason in plain] == ["length", "stop", "length", "length"]
    # With a preemption and a cancellation.
    found, repeats, preemptions = served(tpu_backend, files, STEPS, 15, (11, 3))
    assert preemptions
    assert repeats.count(STEPS) > 2
    assert found[:3] == plain[:3]
    ids, reason = found[3]
    assert reason == "cancelled"
    assert plain[3][0][: len(ids)] == ids
