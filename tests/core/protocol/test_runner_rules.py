"""The call rules of runners: the same for every implementation."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import ProtocolError
from inl.models.llama import MODEL
from inl.protocol.runner import PipelinedRunner, Runner
from inl.runners.encoder_runner import EncoderRunner
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import LocalRunner
from inl.runners.worker_runner import WorkerRunner
from inl.spec.message import MASKED, admit_frame, release_frame
from inl.testing.hash_runner import HashRunner
from inl.testing.play import one_step
from inl.testing.tiny import (
    MemoryCheckpoint,
    local_runner,
    reference_ranks,
    tiny_llama,
)

VOCAB = 96


def checkpoint():
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=4))


def local(limits):
    backend = ReferenceBackend(Device("reference:0"))
    return local_runner(backend, MODEL, checkpoint(), limits)


def ranks(limits):
    return reference_ranks(Device("reference:0"), MODEL, checkpoint(), limits, ranks=2)


def worker(limits):
    options = {"limits": asdict(limits)}
    return WorkerRunner(sys.executable, options, factory="worker_factories:hashes")


MAKERS = {
    HashRunner: HashRunner,
    LocalRunner: local,
    RankRunner: ranks,
    WorkerRunner: worker,
}


@pytest.fixture(params=MAKERS, ids=lambda kind: kind.__name__)
def runner(request, small, monkeypatch):
    """A runner whose slot 1 is admitted with blocks 1 and 2."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    made = MAKERS[request.param](small(vocab=VOCAB, depth=2))
    made.submit(admission(made.limits))
    yield made
    made.close()


def admission(limits, slot=1):
    width = limits.max_blocks_per_seq
    return admit_frame(slot, [[1, 2]], groups=1, max_blocks_per_seq=width)


def step(runner, number, tokens=(3,), flags=0):
    parts = [(1, list(tokens))]
    decoding = int(number > 1)
    return one_step(runner.limits, parts, step=number, decoding=decoding, flags=flags)


def masks(rows=1, words=VOCAB // 32):
    return np.full((rows, words), -1, np.int32)


def refused(call, *arguments, match):
    with pytest.raises(ProtocolError, match=match):
        call(*arguments)


def test_every_runner_is_covered():
    implementations = {
        kind
        for kind in PipelinedRunner.__subclasses__()
        if kind.__module__[:4] == "inl."
    }
    assert implementations == set(MAKERS)
    assert {k for k in Runner.__subclasses__() if k.__module__[:4] == "inl."} == {
        PipelinedRunner,
        EncoderRunner,  # takes no steps
    }


def test_at_most_depth_steps_are_in_flight(runner):
    refused(runner.collect, match="collect: no step is in flight")
    runner.submit(step(runner, 1))
    runner.submit(step(runner, 2, [-1]))
    message = "step 3: 2 steps are in flight, the limit is 2; call collect first"
    refused(runner.submit, step(runner, 3, [-1]), match=message)
    runner.submit(
        release_frame(1, groups=1, max_blocks_per_seq=runner.limits.max_blocks_per_seq)
    )
    runner.submit(admission(runner.limits))
    assert [runner.collect().step for _ in range(2)] == [1, 2]
    refused(runner.collect, match="collect: no step is in flight")


def test_the_frame_is_the_callers_after_submit(runner):
    frame = step(runner, 1, [5, 6])
    runner.submit(frame)
    frame[:] = 0
    assert runner.collect().step == 1


def test_a_bad_header_is_refused_and_changes_nothing(runner):
    frame = step(runner, 1)
    frame[0] = 7
    refused(runner.submit, frame, match=r"frame word 0 \(version\)")
    runner.submit(step(runner, 1))
    assert runner.collect().step == 1


def test_a_masked_step_is_sampled_once_before_anything_else(runner):
    refused(runner.sample, 1, masks(), match="sample: step 1 does not wait for masks")
    runner.submit(step(runner, 1, flags=MASKED))
    waits = "step 1 waits for its masks: call sample first"
    refused(runner.submit, step(runner, 2, [-1]), match=waits)
    refused(runner.submit, admission(runner.limits, 2), match=waits)
    refused(runner.collect, match=waits)
    refused(runner.sample, 2, masks(), match="step 2 does not wait for masks")
    runner.sample(1, masks())
    refused(runner.sample, 1, masks(), match="step 1 does not wait for masks")
    runner.submit(step(runner, 2, [-1]))
    assert [runner.collect().step for _ in range(2)] == [1, 2]


def test_an_earlier_step_is_collected_while_a_masked_one_waits(runner):
    runner.submit(step(runner, 1))
    runner.submit(step(runner, 2, [-1], flags=MASKED))
    assert runner.collect().step == 1
    refused(runner.collect, match="step 2 waits for its masks")
    only = masks() * 0
    only[0, 1] = 1 << 5
    runner.sample(2, only)
    only[:] = 0
    reply = runner.collect()
    assert (reply.step, int(reply.tokens[0, 0])) == (2, 37)


@pytest.mark.parametrize(
    "wrong",
    [masks(rows=2), masks(words=2), masks().astype(np.int64), masks()[0]],
    ids=["rows", "words", "dtype", "dimensions"],
)
def test_masks_of_another_shape_are_refused(runner, wrong):
    runner.submit(step(runner, 1, flags=MASKED))
    match = r"masks of step 1: found .* accepts int32 \[1, 3\]"
    refused(runner.sample, 1, wrong, match=match)
    runner.sample(1, masks())
    assert runner.collect().step == 1


def test_nothing_but_close_follows_close(runner):
    runner.submit(step(runner, 1))
    runner.close()
    runner.close()
    closed = "runner: is closed; create another"
    refused(runner.submit, admission(runner.limits), match=closed)
    refused(runner.sample, 1, masks(), match=closed)
    refused(runner.collect, match=closed)
