"""N-gram drafts: the longest match by brute force, replaced tokens, expected rates."""

from __future__ import annotations

from random import Random

import pytest

from inl.speculation.drafters import (
    CANDIDATES,
    LONGEST,
    RATES,
    DraftQuery,
    NgramDrafter,
)

MATCHED = list(range(100, 120))
"""Tokens that occur nowhere else."""


def predict(tokens, limit=4, drafter=None):
    return (drafter or NgramDrafter()).propose([DraftQuery(1, tokens, limit)])[0]


def matched(tokens, place):
    """How many tokens before a place equal those at the end."""
    count = 0
    while (
        count < min(place, LONGEST) and tokens[place - 1 - count] == tokens[-1 - count]
    ):
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_longest_match_is_continued(seed):
    random = Random(seed)
    tokens, drafter, found = [], NgramDrafter(), 0
    for length in range(120):
        predicted = predict(tokens, 3, drafter)
        places = [p for p in range(2, length) if matched(tokens, p) >= 2]
        best = max(
            reversed(places[-CANDIDATES:]), key=lambda p: matched(tokens, p), default=0
        )
        if best and matched(tokens, best) >= 3:
            period = tokens[best:]
            assert predicted == [period[at % len(period)] for at in range(3)]
            found += 1
        tokens.append(random.randrange(4))
    assert found > 40


def test_nothing_is_predicted_from_less_than_two_equal_tokens():
    assert not predict([])
    assert not predict([1])
    assert not predict([1, 1])
    assert not predict([1, 2, 3, 1])
    assert predict([1, 2, 3, 1, 2]) == [3, 1, 2, 3]


@pytest.mark.parametrize("replaced", [1, 2, 3])
def test_copying_goes_on_after_replaced_tokens(replaced):
    source = list(range(20))
    copied = [*source, *source[:10]]
    drafter = NgramDrafter()
    assert predict(copied, 4, drafter) == [10, 11, 12, 13]
    changed = [*copied, *MATCHED[:replaced]]
    predicted = predict(changed, 4, drafter)
    if replaced > 2:
        assert not predicted
        return
    assert predicted == source[10 + replaced : 14 + replaced]
    assert drafter.rate(1) == RATES[0]
    # Asked again, as after a step without drafts, it answers the same.
    assert predict(changed, 4, drafter) == predicted


def test_the_rate_grows_with_the_match():
    rates = []
    for count in range(2, 18):
        drafter = NgramDrafter()
        predict([*MATCHED[:count], 1, 2, 3, *MATCHED[:count]], 4, drafter)
        rates.append(drafter.rate(1))
    assert rates == sorted(rates)
    assert rates[0] < rates[2] < rates[-1] == RATES[LONGEST]


def test_sequences_are_apart_and_forgotten():
    drafter = NgramDrafter()
    queries = [DraftQuery(1, [1, 2, 3, 1, 2], 1), DraftQuery(2, [1, 2, 4, 1, 2], 1)]
    assert drafter.propose(queries) == [[3], [4]]
    drafter.forget(1)
    drafter.forget(3)
    assert drafter.propose([DraftQuery(1, [1, 2], 1)]) == [()]
