"""Bounds on what waits and on what a request may hold."""

from __future__ import annotations

import asyncio

import pytest

from held_runner import HeldRunner, wait_submitted
from inl.config import EngineConfig
from inl.engine.options import make_requests
from inl.errors import QueueFull, RequestError


def fill(engine, count, prompt=(1, 2, 3)):
    return [engine.submit(list(prompt), max_tokens=4) for _ in range(count)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_queued_requests": 5}, r"queue: 5 requests wait, accepts 5 \(max_queued"),
        ({"max_queued_tokens": 17}, r"15 tokens wait, found a prompt of 3 more, acc"),
    ],
)
def test_a_full_queue_refuses_at_once_and_loses_nothing(
    hashed, drained, settings, words
):
    steps = []
    engine = hashed(on_step=steps.append, **settings)
    waiting = fill(engine, 5)
    for call in (engine.submit, engine.stream, engine.generate):
        with pytest.raises(QueueFull, match=words):
            call([1, 2, 3], max_tokens=4)
    with pytest.raises(QueueFull, match=words):
        engine.generate([[1, 2, 3], [4]], max_tokens=4)
    with pytest.raises(QueueFull, match=words):
        asyncio.run(engine.agenerate([1, 2, 3], max_tokens=4))
    assert not steps
    assert issubclass(QueueFull, RequestError)
    while not all(handle.completed for handle in waiting):
        engine.step()
    assert len({handle.completion().token_ids for handle in waiting}) == 1
    assert engine.generate([1, 2, 3], max_tokens=4).token_ids
    assert drained(engine)


def test_only_waiting_requests_count(hashed):
    engine = hashed(max_batch=4, max_queued_requests=2)
    fill(engine, 2)
    engine.step()
    handles = fill(engine, 2)
    engine.step()
    handles += fill(engine, 2)
    with pytest.raises(QueueFull):
        fill(engine, 1)
    engine.cancel(handles[-1])
    fill(engine, 1)


def test_a_prompt_longer_than_the_queue_waits_alone(hashed):
    engine = hashed(max_queued_tokens=8)
    assert len(engine.generate([7] * 50, max_tokens=3).token_ids) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_list_is_queued_as_it_drains(hashed, asynchronous):
    bounded = hashed(max_queued_requests=3, max_queued_tokens=40)
    prompts = [[at % 50, at % 7] for at in range(200)]
    wanted = hashed().generate(prompts, max_tokens=3)
    if asynchronous:
        found = asyncio.run(bounded.agenerate(prompts, max_tokens=3))
    else:
        found = bounded.generate(prompts, max_tokens=3)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


def test_tasks_beyond_the_bound_are_refused_and_the_others_served(hashed):
    engine = hashed(runner=HeldRunner, max_batch=2, max_queued_requests=3)
    gate = engine.core.runner.gate
    gate.hold_after(0)

    async def main():
        first = asyncio.create_task(engine.agenerate([0], max_tokens=20))
        assert await asyncio.to_thread(gate.is_held.wait, 300)
        calls = [engine.agenerate([at], max_tokens=20) for at in range(1, 30)]
        others = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.to_thread(wait_submitted, engine, 30)
        gate.release()
        return [await first, *await others]

    found = asyncio.run(main())
    refused = [each for each in found if isinstance(each, QueueFull)]
    answers = [each for each in found if not isinstance(each, BaseException)]
    assert (len(refused), len(answers)) == (26, 4), "one runs and three wait"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"stop": ["x"] * 65},
            r"stop: found 65 entries, accepts 64 \(EngineConfig.max_stop_strings\)",
        ),
        (
            {"stop": "x" * 1025},
            r"stop: found a string of 1025 characters, accepts 1024 \(EngineConfig",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            r"logit_bias: found 1025 entries, accepts 1024 \(EngineConfig.max_logit_b",
        ),
    ],
)
def test_options_are_bounded_by_default(hashed, options, words):
    with pytest.raises(RequestError, match=words):
        make_requests([1], options, room=1)
    engine = hashed()
    with pytest.raises(RequestError, match=words):
        engine.generate([1], **options)
    with pytest.raises(RequestError, match=words):
        engine.stream([1], **options)


def test_bounds_can_be_raised(hashed):
    engine = hashed(max_stop_strings=100, max_stop_length=2000, max_logit_bias=200)
    bias = dict.fromkeys(range(200), 0.0)
    options = {"stop": ["\N{SNOWMAN}" * 2000] * 100, "logit_bias": bias}
    assert engine.generate([1], max_tokens=2, **options).token_ids
    with pytest.raises(RequestError, match="found 201 entries, accepts 200"):
        engine.generate([1], logit_bias=dict.fromkeys(range(201), 0.0))


@pytest.mark.parametrize(
    "name",
    [
        "max_queued_requests",
        "max_queued_tokens",
        "max_stop_strings",
        "max_stop_length",
        "max_logit_bias",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 2.5, None, True])
def test_bounds_are_counts(name, value):
    with pytest.raises(RequestError, match=f"EngineConfig.{name}: found {value}"):
        EngineConfig(**{name: value})
