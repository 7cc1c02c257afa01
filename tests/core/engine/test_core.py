"""The engine core: scheduler and runner together."""

from __future__ import annotations

import numpy as np
import pytest

from inl.engine.core import EngineCore, StepRecord
from inl.engine.frame_encoder import frames
from inl.errors import ProtocolError, RequestError, WorkerLost
from inl.protocol.runner import Reply
from inl.scheduling.plan import Chunk, Plan, SchedulerConfig
from inl.scheduling.request import Event, Request
from inl.spec.message import header
from inl.spec.step import Bucket, Scores
from inl.testing.hash_runner import HashRunner


def finished(engine):
    """Outputs and finish reasons by request, after running until nothing is left."""
    answers, reasons = {}, {}
    for _ in range(1_000):
        if not engine.has_work:
            return answers, reasons
        for number, token, reason, _ in engine.step():
            if token is not None:
                answers.setdefault(number, []).append(token)
            if reason is not None:
                reasons[number] = reason
    raise AssertionError("the engine does not come to an end")


def test_tokens_do_not_depend_on_the_batch_or_the_cache(small, answer_of):
    limits = small(blocks=(40,))
    fields = [
        {"prompt": range(10), "max_tokens": 9},
        {"prompt": range(12), "max_tokens": 5, "temperature": 0.5, "seed": 3},
        {"prompt": range(12), "max_tokens": 5, "temperature": 0.5, "seed": 4},
    ]
    wanted = [answer_of(Request(**each), limits) for each in fields]
    assert wanted[1] != wanted[2]
    for policy in (
        SchedulerConfig(),
        SchedulerConfig(token_budget=3),
        SchedulerConfig(max_rows=1),
        SchedulerConfig(use_kv_cache=False),
    ):
        engine = EngineCore(HashRunner(limits), policy)
        numbers = [engine.add(Request(**each)) for each in fields]
        answers, reasons = finished(engine)
        assert [answers[number] for number in numbers] == wanted
        assert set(reasons.values()) == {"length"}


def test_on_step_receives_each_step(small):
    records = []
    engine = EngineCore(HashRunner(small()), on_step=records.append)
    engine.add(Request([1, 2, 3], max_tokens=2))
    engine.add(Request([4], max_tokens=2))
    finished(engine)
    assert records == [
        StepRecord(1, Bucket(4, 2), 4, 2, 0, (1, 2)),
        StepRecord(2, Bucket(2, 2), 2, 2, 2, (1, 2)),
    ]
    assert engine.stats[:5] == (2, 6, 4, 0, 0)


def test_an_uncached_engine_computes_more_tokens(small):
    tokens = []
    for cached in (True, False):
        engine = EngineCore(HashRunner(small()), SchedulerConfig(use_kv_cache=cached))
        engine.add(Request([1, 2, 3], max_tokens=4))
        finished(engine)
        tokens.append(engine.stats.tokens)
    assert tokens == [3 + 1 + 1 + 1, 3 + 4 + 5 + 6]


def test_two_steps_are_in_flight_while_tokens_are_read(small):
    engine = EngineCore(HashRunner(small()))
    engine.add(Request([1, 2, 3], max_tokens=4))
    assert len(engine.step()) == 1
    assert (engine.stats.steps, len(engine.scheduler.in_flight)) == (2, 1)


def test_cancelling_gives_one_event_and_frees_the_blocks(small):
    engine = EngineCore(HashRunner(small()))
    number = engine.add(Request([1, 2, 3], max_tokens=9))
    engine.step()
    assert engine.cancel(number)
    assert not engine.cancel(number)
    assert engine.step()[0] == Event(number, None, "cancelled")
    assert finished(engine) == ({}, {})
    assert engine.runner.slots_in_use == []
    assert engine.scheduler.kv_cache.available_blocks == 8


def test_a_request_can_be_cancelled_with_another_reason(small):
    engine = EngineCore(HashRunner(small()))
    number = engine.add(Request([1], max_tokens=9))
    engine.cancel(number, "stop")
    assert finished(engine) == ({}, {number: "stop"})


@pytest.mark.parametrize("number", [0, -1, 2])
def test_an_unknown_id_cannot_be_cancelled(small, number):
    engine = EngineCore(HashRunner(small()))
    engine.add(Request([1]))
    with pytest.raises(RequestError, match=f"found id {number}, accepts ids that add"):
        engine.cancel(number)


class ChangedReplies(HashRunner):
    """Applies ``change`` to each reply."""

    def __init__(self, limits, change):
        super().__init__(limits)
        self.change = change

    def collect(self):
        return self.change(super().collect())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda reply: reply._replace(step=9), "reply: found step 9, expected 1"),
        (lambda reply: reply._replace(tokens=reply.tokens[:1]), "found tokens [1, 1]"),
        (lambda reply: reply._replace(tokens=reply.tokens[:, 0]), "found tokens [2]"),
        (lambda reply: reply._replace(tokens=reply.tokens[:, :0]), "tokens [2, 0]"),
        (
            lambda reply: reply._replace(tokens=np.array([[3], [100]], np.int32)),
            "step 1, row 1: found token 100, the vocabulary is 0 to 99",
        ),
        (
            lambda reply: reply._replace(tokens=np.array([[-2], [5]], np.int32)),
            "row 0: found token -2",
        ),
    ],
    ids=["step", "rows", "flat", "empty", "over", "under"],
)
def test_an_invalid_reply_is_an_error(small, change, words):
    engine = EngineCore(ChangedReplies(small(), change))
    engine.add(Request([1], max_tokens=2))
    engine.add(Request([1], max_tokens=2))
    events = engine.step()
    assert [event.finish_reason for event in events] == ["error", "error"]
    assert isinstance(events[0].error, ProtocolError)
    assert words in str(events[0].error)


def test_padding_of_replies_is_ignored(small):
    def pad(reply):
        rows = np.full((8, 1), -5, np.int32)
        rows[: len(reply.tokens)] = reply.tokens
        return Reply(reply.step, rows)

    engine = EngineCore(ChangedReplies(small(), pad))
    number = engine.add(Request([1], max_tokens=2))
    assert finished(engine)[1] == {number: "length"}


def test_an_error_of_on_step_is_raised_to_the_caller(small):
    def watch(record):
        raise LookupError(record.step)

    engine = EngineCore(HashRunner(small()), on_step=watch)
    engine.add(Request([1]))
    with pytest.raises(LookupError, match="1"):
        engine.step()


def test_step_numbers_wrap_around(small):
    limits = small()
    request = Request([1, 2])
    request.slot, request.prefill_len = 1, 2
    plan = Plan([], [], [], [Chunk(request, 0, 2)], 0, 2**31 + 5, Bucket(2, 1))
    (frame,) = frames(plan, limits)
    assert header(frame).step == 5


@pytest.mark.parametrize(
    "wrong",
    [None, Scores(*(np.zeros((0, 3)[:size], np.float32) for size in (1, 2, 2)))],
    ids=["none", "too few"],
)
def test_missing_scores_are_an_error(small, wrong):
    engine = EngineCore(
        ChangedReplies(small(), lambda reply: reply._replace(scores=wrong))
    )
    engine.add(Request([1], max_tokens=2, logprobs=3))
    (event,) = engine.step()
    assert isinstance(event.error, ProtocolError)
    assert "found no scores for 1 rows" in str(event.error)


def test_penalties_are_the_same_on_a_replacement_runner(small, answer_of):
    class Mortal(HashRunner):
        left = 9

        def collect(self):
            self.left -= 1
            if not self.left:
                raise WorkerLost("killed")
            return super().collect()

    limits = small(blocks=(30,))
    fields = [
        {"prompt": [5, 5, 6], "frequency_penalty": 0.5, "max_tokens": 20},
        {"prompt": range(9), "repetition_penalty": 1.5, "max_tokens": 20},
        {"prompt": [7], "temperature": 1, "top_k": 3, "logit_bias": {4: 2.0}},
    ]
    engine = EngineCore(Mortal(limits), replace=lambda _: HashRunner(limits))
    numbers = [engine.add(Request(**each)) for each in fields]
    answers, reasons = finished(engine)
    assert engine.restarts == 1
    assert set(reasons.values()) == {"length"}
    for number, each in zip(numbers, fields, strict=True):
        assert answers[number] == answer_of(Request(**each), limits)


def test_a_replacement_must_serve_every_live_request(small):
    class Dead(HashRunner):
        def collect(self):
            raise WorkerLost("killed")

    cheap = small(sampler="sample")
    engine = EngineCore(Dead(small()), replace=lambda _: HashRunner(cheap))
    number = engine.add(Request([1], min_p=0.5, temperature=1.0))
    event = next(event for event in engine.step() if event.request == number)
    assert 'sampling="sample"; needs' in str(event.error)
    assert 'and "sample_filtered"' in str(event.error)
