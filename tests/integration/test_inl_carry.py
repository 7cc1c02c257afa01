"""A velocity that goes on from token to token of an answer, on every device here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

BOUND = 1e-4


@pytest.fixture(scope="module", params=["reference", "cpu"])
def carried(request, recorded):
    return recorded("inl-v013", request.param, velocity="carry")


@pytest.fixture(scope="module")
def plainly(plain_deep, deep_made):
    """Logits [ids, V] of a text of which the first ``prompt`` tokens are the prompt."""

    def run(ids, prompt, *, carry=True):
        plain = plain_deep(*deep_made, prompt=prompt, carry=carry)
        return np.array([plain.feed(token) for token in ids])

    return run


@pytest.fixture(scope="module")
def continued(plain_deep, deep_made):
    """The greedy answer to a prompt, and by how much its closest choice was made."""
    known = {}

    def run(ids, count):
        key = tuple(ids), count
        if key not in known:
            plain = plain_deep(*deep_made, prompt=len(ids), carry=True)
            answer, gaps, fed = [], [], list(ids)
            for _ in range(count):
                for token in fed:
                    logits = plain.feed(token)
                best, second = np.sort(logits)[-1:-3:-1]
                gaps.append((best - second) / abs(best))
                fed = [int(np.argmax(logits))]
                answer += fed
            # Else float32 could not tell which token it is.
            assert min(gaps) > 1e-4
            known[key] = answer
        return known[key]

    return run


def test_the_plain_model_is_the_recorded_one(carried, plainly, apart):
    for ids, want in zip(carried.prompts[:3], carried.logits, strict=False):
        assert apart(plainly(ids, len(ids), carry=False), want) < 1e-5


@pytest.mark.parametrize("prompt", [1, 6, 20])
def test_logits_of_an_answer(carried, plainly, apart, prompt):
    ids = carried.prompts[2]
    want = plainly(ids, prompt)
    fed = carried.runner()
    fed.admit(1)
    cut = prompt // 2
    if cut:
        fed((1, ids[:cut]))
    (found,) = fed((1, ids[cut:prompt]), pads=(2, 1))
    assert apart(found, want[cut:prompt]) < BOUND
    for place in range(prompt, len(ids)):
        (found,) = fed((1, ids[place : place + 1]), decoding=1, pads=(1, 2))
        assert apart(found, want[place : place + 1]) < BOUND, place
    reset = plainly(ids, prompt, carry=False)
    assert apart(reset[prompt:], want[prompt:]) > 10 * BOUND


def test_a_slot_forgets_whose_it_was(carried, plainly, apart):
    fed = carried.runner()
    ids = carried.prompts[1]
    for prompt in (3, 5):
        fed.admit(1)
        fed((1, ids[:prompt]))
        (found,) = fed((1, ids[prompt : prompt + 1]), decoding=1)
        want = plainly(ids[: prompt + 1], prompt)[-1:]
        assert apart(found, want) < BOUND


def test_strangers_keep_their_own(carried, plainly, apart):
    a, b = carried.prompts[2], carried.prompts[3]
    fed = carried.runner()
    fed.admit(1)
    fed.admit(2)
    fed((1, a[:8]), (2, b[:5]))
    want = plainly(a, 8), plainly(b[:40], 5)
    for step in range(6):
        rows = (2, b[5 + step : 6 + step]), (1, a[8 + step : 9 + step])
        found = fed(*rows, decoding=2, pads=(3, 2))
        assert apart(found[0], want[1][5 + step : 6 + step]) < BOUND
        assert apart(found[1], want[0][8 + step : 9 + step]) < BOUND


def test_answers(carried, answered, continued):
    prompts = carried.prompts
    found = answered(carried.core(), prompts, 24)
    assert found == [continued(ids, 24) for ids in prompts]


def test_answers_survive_preemption(carried, answered, continued):
    prompts = [*carried.prompts, carried.prompts[2][:8]]
    core = carried.core(blocks=14)
    found = answered(core, prompts, 24)
    assert core.stats.preemptions > 0
    assert found == [continued(ids, 24) for ids in prompts]


def test_without_replay_preemption_would_show(carried, answered, continued):
    """Recomputing an answer as a prompt forgets where it began."""
    core = carried.core(blocks=14, replay=False)
    prompts = [*carried.prompts, carried.prompts[2][:8]]
    found = answered(core, prompts, 24)
    assert core.stats.preemptions > 0
    assert found != [continued(ids, 24) for ids in prompts]


@pytest.mark.parametrize("replay", [True, False])
def test_blocks_of_an_answer_are_not_shared(carried, answered, continued, replay):
    """A prompt that repeats an answer is a prompt: other keys and values."""
    core = carried.core(replay=replay)
    first = carried.prompts[2]
    (answer,) = answered(core, [first], 24)
    assert answer == continued(first, 24)
    before = core.stats.prefix_hit_tokens
    again = first + answer[:20]
    (found,) = answered(core, [again], 24)
    hits = core.stats.prefix_hit_tokens - before
    size = core.runner.limits.block_size
    assert (found == continued(again, 24)) is replay
    assert (hits == len(first) // size * size) is replay


def test_a_whole_prompt_may_be_shared(carried, answered, continued):
    core = carried.core()
    prompts = [carried.prompts[2][:24]] * 3
    for ids in prompts:
        (found,) = answered(core, [ids], 12)
        assert found == continued(ids, 12)
    # The last block is computed again: its last velocity is the answer's first.
    assert core.stats.prefix_hit_tokens == 2 * 16


def test_uncached_is_the_same(carried, answered, continued):
    core = carried.core()
    core.scheduler.config = replace(core.scheduler.config, use_kv_cache=False)
    core.scheduler._publishes = False
    prompts = [ids[:9] for ids in carried.prompts[:3]]
    found = answered(core, prompts, 6)
    assert found == [continued(ids, 6) for ids in prompts]


def test_penalties_count_a_replayed_answer_once(carried, answered):
    """Preempted or not, the same tokens are chosen."""
    prompts = [*carried.prompts, carried.prompts[2][:8]]
    options = {"frequency_penalty": 2.0, "repetition_penalty": 1.3}
    calm = carried.core()
    want = answered(calm, prompts, 24, **options)
    assert calm.stats.preemptions == 0
    core = carried.core(blocks=14)
    assert answered(core, prompts, 24, **options) == want
    assert core.stats.preemptions > 0
