"""Warming up runs every program once, before anyone waits for it."""

from __future__ import annotations

from typing import final

import pytest
import torch

from inl import EngineConfig
from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.device import Device
from inl.errors import ProtocolError
from inl.models.llama import MODEL
from inl.runtime.load import LanguageModel, start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.values import Bucket, Limits
from inl_torch.backend import TorchBackend, inferring

LIMITS = Limits(slots=3, blocks=(20,), block_size=4, width=8, vocab=97)
BUCKETS = (Bucket(1, 1), Bucket(8, 2), Bucket(8, 2, 1, "full"))


@final
class Counting(TorchBackend):
    """Has programs, and counts how often each runs."""

    traits = Traits()

    def __init__(self):
        self.device, self.place = Device("cpu:0"), torch.device("cpu")
        self.runs = {}

    def memory(self):
        return host_memory()

    def buckets(self, limits):
        return BUCKETS

    def compile(self, function, bucket, *, consumes):
        def run(*args):
            self.runs[bucket] = self.runs.get(bucket, 0) + 1
            return inferring(function)(*args)

        return run if consumes == (2,) else inferring(function)


def decode(runner):
    table = [5, 2, 9, 14, 1, 7, 3, 11]
    runner.submit(admit_frame(1, [table], groups=1, width=8))
    found = []
    for step, ids in enumerate([[4, 88, 17], [-1], [-1], [-1]]):
        bucket = BUCKETS[len(ids) > 1]
        rows = [Row(1, ids)]
        runner.submit(
            step_frame(
                bucket, rows, step=step, groups=1, block_size=4, decode_rows=step > 0
            )
        )
        found.append(int(runner.collect().tokens[0, 0]))
    return found


def test_every_program_runs_once_and_answers_stay(tiny_llama):
    cold = tiny_llama(3).runner(Counting(), "float32", LIMITS)
    want = decode(cold)
    backend, told = Counting(), []
    runner = tiny_llama(3).runner(backend, "float32", LIMITS)
    runner.warm_up(lambda done, total: told.append((done, total)))
    assert backend.runs == dict.fromkeys(BUCKETS, 1)
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert decode(runner) == want


def test_a_step_in_flight_is_not_disturbed(tiny_llama):
    runner = tiny_llama(3).runner(Counting(), "float32", LIMITS)
    runner.submit(admit_frame(1, [[5] * 8], groups=1, width=8))
    frame = step_frame(
        BUCKETS[0], [Row(1, [4])], step=0, groups=1, block_size=4, decode_rows=0
    )
    runner.submit(frame)
    with pytest.raises(ProtocolError, match="in flight"):
        runner.warm_up()


@pytest.mark.parametrize("warm_up", [True, False])
def test_an_engine_makes_its_programs_at_the_start_where_asked_to(tiny_llama, warm_up):
    tiny, backend, told = tiny_llama(3), Counting(), []
    language = LanguageModel(MODEL, tiny.config, tiny.checkpoint)
    config = EngineConfig(dtype="float32", warm_up=warm_up)
    runner = start_runner(
        language, backend, config, limits=LIMITS,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert backend.runs == (dict.fromkeys(BUCKETS, 1) if warm_up else {})
    weights = [pair for pair in told if pair[1] != len(BUCKETS)]
    assert weights == [(done, 18) for done in range(1, 19)]
    assert told[18:] == ([(1, 3), (2, 3), (3, 3)] if warm_up else [])
    decode(runner)
