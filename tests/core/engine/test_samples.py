"""``n`` completions of one prompt, and log-probabilities of prompts."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest

from inl.errors import RequestError
from inl.scheduling.request import Status
from inl.spec.message_header import SCORED, header
from inl.testing.tiny import plain_logits

PROMPT = [each % 251 for each in range(3, 33)]


def samples_of(completion):
    return [completion, *completion.alternatives]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_are_those_of_single_requests(hashed, prefix_cache):
    engine = hashed(prefix_cache=prefix_cache)
    options = {"temperature": 0.9, "max_tokens": 9}
    many = samples_of(engine.generate(PROMPT, n=5, seed=40, **options))
    assert [each.seed for each in many] == [40, 41, 42, 43, 44]
    alone = [engine.generate(PROMPT, seed=40 + each, **options) for each in range(5)]
    assert [each.token_ids for each in many] == [each.token_ids for each in alone]
    assert len({each.token_ids for each in many}) == 5


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once(hashed, prefix_cache):
    engine = hashed(prefix_cache=prefix_cache)
    engine.generate(PROMPT, n=6, max_tokens=1)
    # 30 tokens are 7 blocks of 4 and 2 tokens, which every sample computes again.
    assert engine.stats.tokens == 30 + 5 * 2
    assert engine.stats.prefix_hit_tokens == 5 * 28
    if not prefix_cache:
        # The blocks of one group are not those of another one.
        engine.generate(PROMPT, n=2, max_tokens=1)
        assert engine.stats.prefix_hit_tokens == 6 * 28


def test_samples_share_blocks_while_they_run(hashed):
    engine = hashed()
    handle = engine.submit(PROMPT, n=4, max_tokens=20)
    while not all(each.token_ids for each in handle.samples):
        engine.step()
    tables = [each.request.block_table[0] for each in handle.samples]
    assert len({tuple(table[:7]) for table in tables}) == 1
    assert len({table[7] for table in tables}) == 4
    pool = engine.core.scheduler.kv_cache.pools[0]
    assert [pool.ref_count(block) for block in tables[0][:8]] == [4] * 7 + [1]


def test_a_sample_that_is_cancelled_first_leaves_the_prompt_to_the_next(
    hashed, drained
):
    engine = hashed(token_budget=8)
    handle = engine.submit(PROMPT, n=3, max_tokens=4, seed=5, temperature=1.0)
    engine.step()
    first, second, third = handle.samples
    assert second.request.status is third.request.status is Status.WAITING
    engine.cancel(first)
    engine.cancel(third)
    while not second.completed:
        engine.step()
    expected = engine.generate(PROMPT, max_tokens=4, seed=6, temperature=1.0)
    assert second.completion().token_ids == expected.token_ids
    assert first.finish_reason == third.finish_reason == "cancelled"
    assert drained(engine)


def test_every_interface_serves_samples(hashed):
    engine = hashed()
    pair = engine.generate([PROMPT, PROMPT[:9]], n=2, max_tokens=3)
    assert [len(samples_of(each)) for each in pair] == [2, 2]
    done = asyncio.run(engine.agenerate(PROMPT, n=3, max_tokens=3, seed=1))
    assert len(samples_of(done)) == 3
    with pytest.raises(RequestError, match="n: found 2, a stream accepts 1"):
        engine.stream(PROMPT, n=2)


def test_the_background_thread_serves_samples(hashed):
    engine, ended = hashed(), threading.Event()
    handles = []

    def listener():
        if handles and all(each.completed for each in handles[0].samples):
            ended.set()

    handles.append(engine.start(PROMPT, listener=listener, n=3, max_tokens=30, seed=1))
    listener()
    assert ended.wait(300)
    done = samples_of(handles[0].completion())
    wanted = samples_of(engine.generate(PROMPT, n=3, max_tokens=30, seed=1))
    assert [each.token_ids for each in done] == [each.token_ids for each in wanted]


@pytest.mark.parametrize("count", [0, -1, 129, 1.5, "2", True, None])
def test_counts_are_checked(hashed, drained, count):
    engine = hashed()
    with pytest.raises(RequestError, match=r"n: found .*, accepts 1 to 128"):
        engine.generate(PROMPT, n=count)
    assert drained(engine)


def test_abort_cancels_the_requests_of_a_key(hashed, drained):
    engine = hashed()
    handles = [
        engine.submit(PROMPT, key=key, max_tokens=50, ignore_eos=True)
        for key in ("a", "b", "a")
    ]
    engine.step()
    assert engine.abort("a") == 2
    assert [each.finish_reason for each in handles] == ["cancelled", None, "cancelled"]
    assert engine.abort() == 1
    assert engine.abort() == 0
    assert drained(engine)


@pytest.mark.parametrize(
    "settings",
    [{}, {"token_budget": 5}, {"prefix_cache": False},
     {"cache_bytes": 5 * 2 * 2 * 8 * 16 * 2 * 4, "context": 48}],
    ids=["batched", "chunked", "no prefix cache", "preempted"],
)  # fmt: skip
def test_prompt_logprobs_are_those_of_an_uncached_computation(
    engines, tiny_made, settings
):
    engine = engines(**settings)
    rng = np.random.default_rng(4)
    prompts = [[int(each) for each in rng.integers(0, 256, 21)] for _ in range(4)]
    for _ in range(2):  # the second time, the prefix cache has them
        results = engine.generate(prompts, prompt_logprobs=3, max_tokens=25)
        for prompt, result in zip(prompts, results, strict=True):
            check(tiny_made, prompt, result.prompt_logprobs)
    plain = engine.generate(prompts, max_tokens=25)
    assert [each.token_ids for each in plain] == [each.token_ids for each in results]
    assert plain[0].prompt_logprobs is None
    assert bool(engine.stats.preemptions) == ("cache_bytes" in settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"token_budget": 5}, {"prefix_cache": False},
     {"cache_bytes": 5 * 2 * 2 * 8 * 16 * 2 * 4, "context": 48}],
    ids=["batched", "chunked", "no prefix cache", "preempted"],
)  # fmt: skip
def test_prompts_are_scored_from_a_token_on(engines, tiny_made, settings):
    """Also where the tokens before are cached, and where blocks end beside it."""
    engine = engines(**settings)
    rng = np.random.default_rng(4)
    prompts = [[int(each) for each in rng.integers(0, 256, 21)] for _ in range(8)]
    starts = [0, 1, 2, 15, 16, 17, 18, 20]
    options = {"prompt_logprobs": 3, "ignore_eos": True}
    for tokens in (25, 0, 25):
        handles = [
            engine.submit(
                prompt, max_tokens=tokens, prompt_logprobs_start=start, **options
            )
            for prompt, start in zip(prompts, starts, strict=True)
        ]
        for prompt, start, handle in zip(prompts, starts, handles, strict=True):
            done = handle.result()
            assert len(done.token_ids) == tokens
            check(tiny_made, prompt, done.prompt_logprobs, start)
    plain = engine.generate(prompts, max_tokens=25, ignore_eos=True)
    scored = [each.completion().token_ids for each in handles]
    assert [each.token_ids for each in plain] == scored
    assert bool(engine.stats.preemptions) == ("cache_bytes" in settings)


def test_only_tokens_from_the_start_are_scored(engines):
    """The steps of a prompt, and those of one whose beginning is cached."""
    engine = engines()
    engine.generate([int(each) for each in range(60)], max_tokens=1)
    kinds = []
    submit = engine.core.runner.submit

    def watched(frame):
        head = header(frame)
        if head.used_tokens:  # no admission or release
            kinds.append((bool(head.flags & SCORED), head.used_tokens))
        submit(frame)

    engine.core.runner.submit = watched
    prompt = [int(each) for each in range(100, 160)]
    options = {"prompt_logprobs": 0, "prompt_logprobs_start": 50, "max_tokens": 0}
    engine.generate(prompt, **options)
    assert kinds == [(False, 49), (True, 10)]
    kinds.clear()
    engine.generate(prompt, **options)
    assert kinds == [(False, 1), (True, 10)]


@pytest.mark.parametrize("start", [-1, 3, 2**40, 0.5, "1", None])
def test_the_first_scored_token_is_one_of_the_prompt(hashed, drained, start):
    engine = hashed()
    with pytest.raises(RequestError, match="prompt_logprobs_start"):
        engine.generate([1, 2, 3], prompt_logprobs=0, prompt_logprobs_start=start)
    assert drained(engine)


def check(tiny_made, prompt, found, start=1):
    logits = plain_logits(*tiny_made, prompt)
    start = max(start, 1)
    assert found[:start] == (None,) * start
    assert len(found) == len(prompt)
    for position, scores in enumerate(found[start:], start - 1):
        row = logits[position]
        exact = row - row.max() - math.log(np.exp(row - row.max()).sum())
        assert scores.token == prompt[position + 1]
        assert scores.logprob == pytest.approx(exact[scores.token], abs=1e-3)
        assert [token for token, _ in scores.top] == list(np.argsort(-exact)[:3])


def test_prompt_logprobs_of_samples_belong_to_the_first(hashed):
    first, second = samples_of(
        hashed().generate(PROMPT, n=2, prompt_logprobs=0, max_tokens=2)
    )
    assert [each and each.token for each in first.prompt_logprobs] == [
        None, *PROMPT[1:],
    ]  # fmt: skip
    assert second.prompt_logprobs is None


def test_prompt_logprobs_need_a_cache(hashed):
    engine = hashed(use_kv_cache=False)
    with pytest.raises(
        RequestError, match="prompt_logprobs: found 1 with use_kv_cache"
    ):
        engine.generate(PROMPT, prompt_logprobs=1)


def test_one_prompt_token_has_no_logprob(hashed):
    assert hashed().generate([7], prompt_logprobs=1).prompt_logprobs == (None,)


@pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (1, 2), (3, 4)])
def test_a_prompt_is_scored_in_its_prefill(engines, tiny_made, tokens, steps):
    """In one step, and without another one if nothing is generated."""
    engine = engines()
    prompt = [int(each) for each in np.random.default_rng(6).integers(0, 256, 60)]
    result = engine.generate(prompt, prompt_logprobs=3, max_tokens=tokens)
    assert engine.stats.steps == steps
    assert (len(result.token_ids), result.finish_reason) == (tokens, "length")
    check(tiny_made, prompt, result.prompt_logprobs)


def test_a_chunked_prompt_is_scored_beside_others(engines, tiny_made):
    engine = engines(token_budget=16)
    rng = np.random.default_rng(7)
    prompts = [[int(each) for each in rng.integers(0, 256, 40)] for _ in range(3)]
    counts = [2, None, 0]
    handles = [
        engine.submit(prompt, prompt_logprobs=count, max_tokens=5, ignore_eos=True)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    while not all(each.completed for each in handles):
        engine.step()
    for prompt, count, handle in zip(prompts, counts, handles, strict=True):
        found = handle.completion().prompt_logprobs
        assert (found is None) == (count is None)
        if found is not None:
            assert [each and each.token for each in found] == [None, *prompt[1:]]
            assert {len(each.top) for each in found[1:]} == {count}
        plain = engine.generate(prompt, max_tokens=5, ignore_eos=True)
        assert handle.completion().token_ids == plain.token_ids


def test_prompts_with_logits_that_are_not_finite_end_with_an_error(hashed, monkeypatch):
    from inl.errors import NonFiniteLogits
    from inl.testing import hash_runner

    true = hash_runner.scores

    def scores(tokens, vocab):
        found = true(tokens, vocab)
        found.chosen[4] = np.nan
        return found

    monkeypatch.setattr(hash_runner, "scores", scores)
    engine = hashed()
    with pytest.raises(NonFiniteLogits, match="NaN"):
        engine.generate(PROMPT, prompt_logprobs=1, max_tokens=0)
