"""INL models against what their own software said of them, on every device here."""

from __future__ import annotations

import pytest

BOUND = 1e-4
VERSIONS = ("inl-v013", "inl-v040")
CASES = [(version, device) for version in VERSIONS for device in ("reference", "cpu")]


@pytest.fixture(scope="module", params=CASES, ids="/".join)
def known(request, recorded):
    return recorded(*request.param)


def test_a_whole_prompt(known, apart):
    for ids, want in zip(known.prompts, known.logits, strict=True):
        fed = known.runner()
        fed.admit(1)
        (found,) = fed((1, ids), pads=(3, 2))
        assert apart(found, want) < BOUND


@pytest.mark.parametrize("first", [1, 7, 32])
def test_a_prompt_and_single_tokens(known, apart, first):
    ids, want = known.prompts[2], known.logits[2]
    fed = known.runner()
    fed.admit(2)
    (found,) = fed((2, ids[:first]))
    assert apart(found, want[:first]) < BOUND
    for place in range(first, len(ids)):
        (found,) = fed((2, ids[place : place + 1]), decoding=1, pads=(0, 2))
        assert apart(found, want[place : place + 1]) < BOUND, place


def test_chunks_at_every_cut(known, apart):
    ids, want = known.prompts[2], known.logits[2]
    fed = known.runner()
    for cut in range(1, len(ids)):
        fed.admit(1)
        (head,), (tail,) = fed((1, ids[:cut])), fed((1, ids[cut:]))
        assert apart(head, want[:cut]) < BOUND, cut
        assert apart(tail, want[cut:]) < BOUND, cut


def test_among_strangers(known, apart):
    """Decoding rows, a chunk of a prompt and a whole one share each step."""
    fed = known.runner()
    a, b, c = known.prompts[1:]
    want = known.logits[1:]
    for slot in (1, 2, 3):
        fed.admit(slot)
    fed((3, a[:5]))
    found = fed((3, a[5:6]), (1, b[:20]), (2, c), decoding=1, pads=(4, 1))
    parts = (want[0][5:6], want[1][:20], want[2])
    for got, exact in zip(found, parts, strict=True):
        assert apart(got, exact) < BOUND
    found = fed((3, a[6:7]), (1, b[20:]), decoding=1)
    for got, exact in zip(found, (want[0][6:7], want[1][20:]), strict=True):
        assert apart(got, exact) < BOUND


def test_greedy_answers(known, answered):
    found = answered(known.core(), known.prompts, 24)
    assert found == known.greedy


def test_answers_survive_preemption(known, answered):
    core = known.core(blocks=14)
    assert answered(core, known.prompts, 24) == known.greedy
    assert core.stats.preemptions > 0
