"""Sampling options through a whole engine."""

from __future__ import annotations

import numpy as np
import pytest

from inl.errors import RequestError
from inl.spec.uniforms import uniform
from inl.testing.tiny import plain_logits

OPTIONS = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.8, "temperature": 0.7},
    {"temperature": 1.2, "top_k": 9},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.1},
    {"logit_bias": {3: 50.0, 7: 49.0}, "presence_penalty": 2.0},
    {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01,
        "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "logit_bias": {10: -1e9, 20: 2.0},
    },
]  # fmt: skip


def uncached(made, plain_choice, prompt, count, seed, options):
    """Output ids in float64, computed without a cache."""
    answer = []
    for _ in range(count):
        ids = [*prompt, *answer]
        logits = plain_logits(*made, ids)[-1]
        drawn = uniform(seed, len(ids))
        answer.append(plain_choice(logits, prompt, answer, drawn, **options))
    return tuple(answer)


@pytest.fixture(scope="module")
def wanted(tiny_made, plain_choice):
    """(prompt, options, expected output) of each of OPTIONS."""
    rng = np.random.default_rng(3)
    cases = []
    for at, options in enumerate(OPTIONS):
        prompt = [int(token) for token in rng.integers(0, 256, 21)]
        answer = uncached(tiny_made, plain_choice, prompt, 16, at, options)
        cases.append((prompt, {**options, "seed": at}, answer))
    return cases


@pytest.mark.parametrize(
    "settings",
    [{}, {"token_budget": 5}, {"use_kv_cache": False}, {"max_batch": 1}],
    ids=str,
)
def test_outputs_equal_an_uncached_computation(engines, wanted, settings):
    engine = engines(**settings)
    # The second time, prompts come from the prefix cache.
    for _ in range(2):
        answers = [
            engine.submit(prompt, max_tokens=16, **options)
            for prompt, options, _ in wanted
        ]
        while not all(answer.completed for answer in answers):
            engine.step()
        found = [answer.completion() for answer in answers]
        assert [each.token_ids for each in found] == [want for *_, want in wanted]
    if not settings:
        assert all(each.cached_tokens >= 16 for each in found)


def test_preemption_does_not_change_outputs(engines, wanted):
    block = 2 * 2 * 8 * 16 * 2 * 4
    engine = engines(cache_bytes=5 * block, context=48)
    answers = [
        engine.submit(prompt, max_tokens=16, **options) for prompt, options, _ in wanted
    ]
    while not all(answer.completed for answer in answers):
        engine.step()
    assert engine.stats.preemptions > 0
    found = [answer.completion().token_ids for answer in answers]
    assert found == [want for *_, want in wanted]


def test_a_sample_does_not_depend_on_filters_of_other_rows(engines):
    plain = {"temperature": 1.0, "seed": 4, "max_tokens": 16}
    alone = engines().generate([5, 6, 7], **plain).token_ids
    steps = []
    engine = engines(on_step=steps.append)
    mine = engine.submit([5, 6, 7], **plain)
    engine.generate([[9, 9], [8]], max_tokens=16, repetition_penalty=2.0)
    assert mine.completion().token_ids == alone
    assert {step.bucket.sampler for step in steps} == {"sample_filtered"}


def test_cheap_requests_use_cheap_programs(engines):
    steps = []
    engine = engines(on_step=steps.append)
    engine.generate([1, 2], max_tokens=3, top_p=0.5, top_k=3)
    assert {step.bucket.sampler for step in steps} == {"greedy"}
    engine.generate([1, 2], max_tokens=3, temperature=0.5)
    assert steps[-1].bucket.sampler == "sample"
    tables = engine.runner.executor.state.tables
    assert not tables.token_counts.any()


def test_logprobs_are_the_log_softmax_of_the_logits(engines, tiny_made):
    prompt = [4, 8, 15]
    options = {"temperature": 1.3, "top_k": 30, "presence_penalty": 1.0, "seed": 2}
    found = engines().generate(prompt, max_tokens=8, logprobs=5, **options)
    plain = engines().generate(prompt, max_tokens=8, **options)
    assert found.token_ids == plain.token_ids
    assert plain.logprobs is None
    assert len(found.logprobs) == 8
    for place, told in enumerate(found.logprobs):
        ids = [*prompt, *found.token_ids[:place]]
        logits = plain_logits(*tiny_made, ids)[-1]
        logs = logits - np.log(np.exp(logits).sum())
        assert told.token == found.token_ids[place]
        assert told.logprob == pytest.approx(logs[told.token], abs=1e-4)
        assert [token for token, _ in told.top] == np.argsort(-logs)[:5].tolist()
        for token, value in told.top:
            assert value == pytest.approx(logs[token], abs=1e-4)


def test_each_request_gets_its_number_of_logprobs(engines):
    engine = engines()
    counts = [None, 0, 3, 20]
    answers = [engine.submit([1, 2], max_tokens=5, logprobs=each) for each in counts]
    while not all(answer.completed for answer in answers):
        engine.step()
    found = [answer.completion() for answer in answers]
    assert len({each.token_ids for each in found}) == 1
    assert found[0].logprobs is None
    for count, each in zip(counts[1:], found[1:], strict=True):
        assert [len(told.top) for told in each.logprobs] == [count] * 5


def test_stop_ids_end_the_output(engines):
    engine = engines()
    free = engine.generate([5, 6], max_tokens=10, temperature=1.0, seed=5)
    end = free.token_ids[4]
    at = free.token_ids.index(end) + 1
    found = engine.generate(
        [5, 6], max_tokens=10, temperature=1.0, seed=5, stop_ids=[end]
    )
    assert (found.token_ids, found.finish_reason) == (free.token_ids[:at], "stop")


def test_a_cancelled_request_keeps_its_tokens(engines, drained):
    engine = engines()
    answer = engine.submit("cancel me", max_tokens=40)
    while len(answer.token_ids) < 3:
        engine.step()
    engine.cancel(answer)
    engine.cancel(answer)
    found = answer.completion()
    assert (found.finish_reason, len(found.token_ids)) == ("cancelled", 3)
    assert drained(engine)
    assert engine.generate("go on", max_tokens=4).token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0}, ["top_p", "0", "1e-06 to 1"]),
        ({"top_p": 1.01}, ["top_p", "1.01"]),
        ({"top_k": -1}, ["top_k", "-1", "0 and above"]),
        ({"min_p": float("nan")}, ["min_p", "nan", "0 to 1"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "0", "0.01 to 100"]),
        ({"presence_penalty": 2.5}, ["presence_penalty", "2.5", "-2 to 2"]),
        ({"frequency_penalty": "x"}, ["frequency_penalty", "'x'"]),
        ({"logit_bias": {256: 1}}, ["logit_bias", "token 256", "0 to 255"]),
        ({"logit_bias": {-1: 1}}, ["logit_bias", "-1"]),
        ({"logit_bias": {"a": 1}}, ["logit_bias", "'a'"]),
        ({"logit_bias": {1: float("-inf")}}, ["logit_bias[1]", "-inf", "-100"]),
        ({"logit_bias": [1]}, ["logit_bias", "[1]", "mapping"]),
        ({"logprobs": 21}, ["logprobs", "21", "0 to 20"]),
        ({"logprobs": True}, ["logprobs", "True", "0 to 20"]),
        ({"stop_ids": [1.5]}, ["stop_ids[0]", "float"]),
        ({"stop_ids": 5}, ["stop_ids", "found 5", "a list"]),
        pytest.param(
            {"stop_ids": iter([5])},
            ["stop_ids", "list_iterator", "a list"],
            id="iterator",
        ),
        ({"ignore_eos": "no"}, ["ignore_eos", "'no'", "True or False"]),
        ({"top_q": 1}, ["top_q", "top_p"]),
    ],
    ids=str,
)
def test_bad_options_are_refused_and_lose_nothing(engines, drained, options, words):
    engine = engines()
    with pytest.raises(RequestError) as caught:
        engine.generate([1], max_tokens=2, **options)
    for word in words:
        assert word in str(caught.value)
    assert drained(engine)


def test_options_that_need_another_sampler_are_refused(engines):
    engine = engines(sampling="sample")
    assert engine.runner.limits.penalty_vocab == 0
    assert engine.generate([1], max_tokens=2, temperature=1.0).token_ids
    with pytest.raises(RequestError, match=r"min_p: found 0\.5: .*=.sample_filtered"):
        engine.generate([1], max_tokens=2, temperature=1.0, min_p=0.5)
    with pytest.raises(RequestError, match="logprobs: found 0: the engine was started"):
        engine.generate([1], max_tokens=2, logprobs=0)
    with pytest.raises(RequestError, match=r"EngineConfig\.sampling: found 'all'"):
        engines(sampling="all")
