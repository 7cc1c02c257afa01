"""Sequences with a grammar are drafted, and drafts change none of their outputs."""

from __future__ import annotations

import pytest

from drafted import assert_guided_drafts
from inl.engine import step_masks
from inl.errors import RequestError
from inl.speculation.planner import Speculation
from soak import Parts, WrongText, soak

VOCAB = 256


@pytest.fixture
def make(engines):
    """Returns a function that makes the engines to compare."""

    def with_settings(**settings):
        def build(speculates, drafter):
            options = {
                "speculation": "ngram", "drafter": drafter, "max_drafts": 4,
                "adaptive_drafts": False,
            }  # fmt: skip
            return engines(**(options if speculates else {}), **settings)

        return build

    return with_settings


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_output_of_a_grammar(make, depth):
    most, total = assert_guided_drafts(make(depth=depth), VOCAB)
    assert most > 1
    assert total > 20


def test_a_mask_one_position_late_is_detected(make, monkeypatch):
    guided = step_masks._guided

    def late(*args):
        masks = guided(*args)
        masks[1:] = masks[:-1].copy()
        return masks

    monkeypatch.setattr(step_masks, "_guided", late)
    with pytest.raises(AssertionError):
        assert_guided_drafts(make(depth=1), VOCAB)
    with pytest.raises((WrongText, RequestError)):
        soak(4, 5_000, Parts(speculation=Speculation), world_steps=100)


def test_refused_drafts_are_not_verified(make, monkeypatch):
    """Drafts of random tokens, nearly all of which the grammars refuse."""
    most, total = assert_guided_drafts(make(depth=1), VOCAB, acceptance=0.0)
    monkeypatch.setattr("inl.speculation.planner.allowed", lambda _, ids: ids)
    assert total < 10 < assert_guided_drafts(make(depth=1), VOCAB, acceptance=0.0)[1]
    assert most <= 4


def test_a_grammar_that_fails_after_a_draft_gives_the_first_mask(monkeypatch):
    from inl.scheduling.request import Request
    from toy_guide import ToyGrammar, ToyGuide

    class Fragile(ToyGuide):
        def masks(self, drafts=()):
            if drafts:
                self.output = ["spoiled"]
                raise RequestError("too complex")
            return super().masks()

    request = Request([1, 2], guide=Fragile(ToyGrammar(3, 97, {5})))
    first = request.guide.masks()
    found = step_masks._masks(request, [4, 4], 3)
    assert [mask.tolist() for mask in found] == first.tolist()
