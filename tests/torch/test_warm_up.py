"""Warm-up runs every program once, before the first request."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import final

import pytest
import torch

from inl import EngineConfig
from inl.backend.base import Precompiler, Traits
from inl.backend.host import host_memory
from inl.device import Device
from inl.errors import OutOfMemory, ProtocolError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.progress import LoadStage
from inl.protocol.wire_json import read_limits
from inl.runners.local_runner import start_runner
from inl.spec.limits import TOKEN_BUDGET, Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl_torch.backend import TorchBackend, inference_mode

LIMITS = Limits(slots=3, blocks=(20,), block_size=4, max_blocks_per_seq=8, vocab=97)
BUCKETS = (Bucket(1, 1), Bucket(8, 2), Bucket(8, 2, 1, "sample_filtered"))


class Compiling(TorchBackend):
    """Has buckets, and records which programs run."""

    traits = Traits()

    def __init__(self):
        self.device, self.place = Device("cpu:0"), torch.device("cpu")

    def memory(self):
        return host_memory()

    def buckets(self, limits):
        return BUCKETS

    def compile(self, function, bucket, *, consumes, info):
        def run(*args):
            self.ran(bucket)
            return inference_mode(function)(*args)

        return run if consumes == (2,) else inference_mode(function)


@final
class Counting(Compiling):
    """Counts how often each program runs."""

    def __init__(self):
        super().__init__()
        self.runs = {}

    def ran(self, bucket):
        self.runs[bucket] = self.runs.get(bucket, 0) + 1


@final
class Precompiling(Compiling):
    """Records precompilation requests and runs."""

    traits = Traits(readers=3, token_budget=64)

    def __init__(self, *, breaks=False):
        super().__init__()
        self.told, self.breaks = [], breaks

    def ran(self, bucket):
        self.told.append(bucket)

    def offers(self, kind):
        return (
            Precompiler(self.precompile)
            if kind is Precompiler
            else super().offers(kind)
        )

    def precompile(self, calls):
        with torch.inference_mode():
            found = [call()[0] for call in calls]
        self.told.append([len(each) for each in found])


def decode(runner):
    table = [5, 2, 9, 14, 1, 7, 3, 11]
    runner.submit(admit_frame(1, [table], groups=1, max_blocks_per_seq=8))
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


def test_every_program_runs_once_and_outputs_are_unchanged(tiny_llama):
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
    runner.submit(admit_frame(1, [[5] * 8], groups=1, max_blocks_per_seq=8))
    frame = step_frame(
        BUCKETS[0], [Row(1, [4])], step=0, groups=1, block_size=4, decode_rows=0
    )
    runner.submit(frame)
    with pytest.raises(ProtocolError, match="in flight"):
        runner.warm_up()


@pytest.mark.parametrize("warm_up", [True, False])
def test_an_engine_with_warm_up_makes_its_programs_at_the_start(tiny_llama, warm_up):
    tiny, backend, told = tiny_llama(3), Counting(), []
    language = LanguageModel(MODEL, tiny.config, tiny.checkpoint)
    config = EngineConfig(dtype="float32", warm_up=warm_up)
    runner = start_runner(
        language, backend, config, limits=LIMITS,
        progress=lambda *report: told.append(report),
    )  # fmt: skip
    assert backend.runs == (dict.fromkeys(BUCKETS, 1) if warm_up else {})
    _, *weights = [report for report in told if report[2] is LoadStage.LOADING]
    assert [done for done, _, _ in weights] == sorted({done for done, _, _ in weights})
    assert len(weights) == 1 + 18
    assert weights[0][0] == 0
    assert weights[-1][0] == weights[-1][1]
    programs = [(done, 3, LoadStage.COMPILING) for done in (1, 2, 3)]
    assert told[1 + len(weights) :] == (programs if warm_up else [])
    decode(runner)


def test_steps_with_and_without_hidden_states_are_warm(tiny_llama):
    tiny, backend = tiny_llama(3), Counting()
    plain = LanguageModel(MODEL, tiny.config, tiny.checkpoint)
    language = replace(plain, taps=(tiny.config.layers,))
    config = EngineConfig(dtype="float32", warm_up=True)
    runner = start_runner(language, backend, config, limits=LIMITS)
    assert backend.runs == dict.fromkeys(BUCKETS, 2)
    made, found = len(runner.executor.program_keys), []
    for is_read in (True, False, True):
        runner.read_taps(is_read)
        found.append(decode(runner))
        assert (runner.taps is not None) == is_read
    assert found[0] == found[1] == found[2]
    assert len(runner.executor.program_keys) == made
    runner = start_runner(plain, Counting(), config, limits=LIMITS)
    runner.read_taps(True)
    assert decode(runner) == found[0]
    assert runner.taps is None


def test_all_programs_are_precompiled_before_the_first_runs(tiny_llama):
    want = decode(tiny_llama(3).runner(Counting(), "float32", LIMITS))
    backend = Precompiling()
    runner = tiny_llama(3).runner(backend, "float32", LIMITS)
    runner.warm_up()
    # Tokens of the two greedy steps, and a pair of the step with scores.
    assert [sorted(backend.told[0]), *backend.told[1:]] == [[1, 2, 2], *BUCKETS]
    assert decode(runner) == want
    assert [told for told in backend.told[4:] if isinstance(told, list)] == []


def test_a_first_step_precompiles_the_decoding_step(tiny_llama):
    want = decode(tiny_llama(3).runner(Counting(), "float32", LIMITS))
    backend = Precompiling()
    runner = tiny_llama(3).runner(backend, "float32", LIMITS)
    assert decode(runner) == want
    long, short = BUCKETS[1], BUCKETS[0]
    assert [sorted(backend.told[0]), *backend.told[1:]] == [
        [1, 2], long, short, short, short,
    ]  # fmt: skip


def test_weights_loaded_in_parallel_are_equal_and_progress_is_ordered(tiny_llama):
    tiny, told = tiny_llama(3), []
    language = LanguageModel(MODEL, tiny.config, tiny.checkpoint)
    config = EngineConfig(dtype="float32")
    plain = start_runner(language, Counting(), config, limits=LIMITS)
    side = start_runner(
        language, Precompiling(), config, limits=LIMITS,
        progress=lambda *report: told.append(report),
    )  # fmt: skip
    done = [bytes_done for bytes_done, _, _ in told]
    assert len(done) == 2 + 18
    assert done == sorted(done)
    assert {(total, stage) for _, total, stage in told[1:]} == {
        (done[-1], LoadStage.LOADING)
    }
    ours, theirs = leaves(side.loaded.weights), leaves(plain.loaded.weights)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(found, wanted)


def test_weights_that_do_not_fit_end_all_readers(tiny_llama, monkeypatch):
    tiny, backend = tiny_llama(3), Precompiling()
    language = LanguageModel(MODEL, tiny.config, tiny.checkpoint)
    monkeypatch.setattr(TorchBackend, "tensor", full)
    with pytest.raises(OutOfMemory, match=r"weights: .* of 18: 4 bytes do not fit"):
        start_runner(language, backend, EngineConfig(), limits=LIMITS)


def full(_self, _data):
    raise OutOfMemory("4 bytes do not fit, 3 bytes are free")


@pytest.mark.parametrize(("asked", "planned"), [(None, 64), (9, 9)])
def test_the_token_budget_defaults_to_that_of_the_backend(tiny_llama, asked, planned):
    tiny = tiny_llama(3)
    language = LanguageModel(MODEL, tiny.config, tiny.checkpoint)
    config = EngineConfig(token_budget=asked, max_batch=2, context=32)
    runner = start_runner(language, Precompiling(), config)
    assert runner.limits.token_budget == planned
    sent = json.loads(json.dumps(asdict(runner.limits)))
    assert read_limits(sent, "there").token_budget == planned
    del sent["token_budget"]
    assert read_limits(sent, "an older one").token_budget == TOKEN_BUDGET
