"""``allowed_token_ids``: only those tokens are generated, on every runner."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import numpy as np
import pytest

from inl.engine.core import EngineCore
from inl.protocol.token_masks import TokenMasks, mask_words
from inl.runners.group_runner import RankRunner
from inl.runners.worker_runner import WorkerRunner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.step import Bucket
from inl.spec.uniforms import uniform
from inl.testing.hash_runner import HashRunner
from inl.testing.tiny import plain_logits
from toy_guide import ToyGrammar, ToyGuide

COUNT = 16
OPTIONS = [
    {"allowed_token_ids": [3, 7, 90, 200, 255]},
    {"allowed_token_ids": {31, 32, 33, 64}, "temperature": 1.5},
    {"allowed_token_ids": range(100, 140), "temperature": 1.2, "top_k": 9},
    {"allowed_token_ids": [5], "repetition_penalty": 1.5},
    {"allowed_token_ids": [8, 9, 10], "logit_bias": {8: -100.0, 11: 500.0}},
    {},
    {"temperature": 1.0},
]


def masked(logits, allowed):
    """Logits with every token but the allowed ones far below the others."""
    if allowed is None:
        return logits
    keep = np.isin(np.arange(len(logits)), list(allowed))
    return np.where(keep, logits, -1e30)


def uncached(made, plain_choice, prompt, seed, options):
    """Output ids in float64, computed without a cache."""
    params = {k: v for k, v in options.items() if k != "allowed_token_ids"}
    output = []
    for _ in range(COUNT):
        ids = [*prompt, *output]
        logits = plain_logits(*made, ids)[-1]
        logits = masked(logits, options.get("allowed_token_ids"))
        number = uniform(seed, len(ids))
        output.append(plain_choice(logits, prompt, output, number, **params))
    return tuple(output)


@pytest.fixture(scope="module")
def expected_outputs(tiny_made, plain_choice):
    """Prompt, options and expected output of each of OPTIONS."""
    rng = np.random.default_rng(9)
    cases = []
    for seed, options in enumerate(OPTIONS):
        prompt = [int(token) for token in rng.integers(0, 256, 21)]
        output = uncached(tiny_made, plain_choice, prompt, seed, options)
        cases.append((prompt, {**options, "seed": seed}, output))
    return cases


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"token_budget": 5},
        {"use_kv_cache": False},
        {"max_batch": 1},
        {"cache_bytes": 5 * 2 * 2 * 8 * 16 * 2 * 4, "context": 48},
    ],
    ids=["batched", "chunked prefill", "uncached", "one by one", "preempted"],
)
def test_outputs_are_those_of_an_uncached_computation(
    engines, expected_outputs, settings
):
    engine = engines(**settings)
    # The second time, prompts come from the prefix cache.
    for _ in range(2):
        handles = [
            engine.submit(prompt, max_tokens=COUNT, **options)
            for prompt, options, _ in expected_outputs
        ]
        while not all(handle.completed for handle in handles):
            engine.step()
        outputs = [handle.completion().token_ids for handle in handles]
        assert outputs == [output for *_, output in expected_outputs]
    assert bool(engine.stats.preemptions) == ("cache_bytes" in settings)


def test_greedy_takes_the_most_likely_allowed_token(engines, tiny_made):
    prompt, allowed = [1, 2, 3], [17, 40, 41, 99]
    logits = plain_logits(*tiny_made, prompt)[-1]
    best = allowed[int(np.argmax(logits[allowed]))]
    completion = engines().generate(prompt, max_tokens=1, allowed_token_ids=allowed)
    assert completion.token_ids == (best,)
    assert best != int(logits.argmax())


def test_logprobs_are_those_without_the_mask(engines, tiny_made):
    prompt, allowed = [4, 8, 15], [17, 40]
    completion = engines().generate(
        prompt, max_tokens=1, allowed_token_ids=allowed, logprobs=3
    )
    logits = plain_logits(*tiny_made, prompt)[-1]
    exact = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    (scores,) = completion.logprobs
    assert scores.token in allowed
    assert scores.logprob == pytest.approx(exact[scores.token], abs=1e-3)
    assert [token for token, _ in scores.top] == list(np.argsort(-exact)[:3])


def test_an_end_token_ends_the_output_only_if_it_is_allowed(engines):
    engine = engines(eos=[50])
    ended = engine.generate([1], max_tokens=5, allowed_token_ids=[50])
    assert (ended.token_ids, ended.finish_reason) == ((50,), "stop")
    going = engine.generate([1], max_tokens=5, allowed_token_ids=[51])
    assert (going.token_ids, going.finish_reason) == ((51,) * 5, "length")


REQUESTS = [
    {"prompt": range(10), "max_tokens": 9, "allowed_token_ids": [3, 33, 99]},
    {"prompt": range(12), "max_tokens": 5, "temperature": 0.5, "seed": 3},
    {"prompt": [7], "max_tokens": 20, "top_k": 3, "temperature": 1.0,
     "allowed_token_ids": range(40, 80)},
    {"prompt": range(9), "max_tokens": 12},
]  # fmt: skip


def worker(limits):
    return WorkerRunner(
        sys.executable,
        {"limits": asdict(limits)},
        factory="worker_factories:hashes",
    )


def ranks(limits):
    return RankRunner(lambda _: HashRunner(limits), 2, abort=lambda: None)


@pytest.mark.parametrize("make", [HashRunner, worker, ranks])
def test_every_runner_serves_masked_rows(make, small, answer_of, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    limits = small(blocks=(14,))
    runner = make(limits)
    engine = EngineCore(runner, SchedulerConfig(token_budget=8))
    requests = [Request(**fields) for fields in REQUESTS]
    guide = ToyGuide(ToyGrammar(7, limits.vocab, {5}))
    requests.append(Request([4, 5], max_tokens=25, guide=guide, stop_ids={5}))
    for request in requests:
        engine.add(request)
    try:
        while engine.has_work:
            assert not any(event.error for event in engine.step())
    finally:
        runner.close()
    for request in requests:
        assert request.output_ids == answer_of(request, limits)


def test_only_steps_that_sample_under_a_mask_are_masked(small):
    sampled = []

    class Watched(HashRunner):
        def sample(self, step, masks):
            sampled.append((step, masks.copy()))
            super().sample(step, masks)

    limits = small(buckets=(Bucket(4, 4), Bucket(8, 4)))
    engine = EngineCore(Watched(limits), SchedulerConfig(token_budget=4))
    engine.add(Request(range(6), max_tokens=2, allowed_token_ids=[0, 40, 99]))
    while engine.has_work:
        engine.step()
    # Step 1 computes a first part of the prompt, whose sample is not used.
    assert [step for step, _ in sampled] == [2, 3]
    for _, masks in sampled:
        assert (masks.shape, masks.dtype) == ((4, 4), np.int32)
        assert masks[0].tolist() == [1, 1 << 8, 0, 1 << 3]
        assert (masks[1:] == -1).all()


def test_mask_words():
    words = mask_words([0, 31, 32, 99], 100)
    assert words.view(np.uint32).tolist() == [1 | 1 << 31, 1, 0, 1 << 3]
    dense = TokenMasks(5, (1,), (words,)).dense(3, 4)
    assert (dense[[0, 2]] == -1).all()
    assert (dense[1] == words).all()
