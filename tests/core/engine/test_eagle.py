"""EAGLE-3 draft heads on the reference backend, against a plain float64 model."""

from __future__ import annotations

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from drafted import outputs, prompts, told
from eagle_heads import PlainHead, fitted, random_head, written
from inl import EngineConfig, InferenceEngine
from inl.errors import InlError, RequestError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

VOCAB = 256


@pytest.fixture(scope="module")
def target():
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2, layers=3)


@pytest.fixture(scope="module")
def head(target):
    return random_head(np.random.default_rng(8), target[0], draft_vocab=200)


@pytest.fixture
def make(target, tmp_path):
    """Makes engines on the tiny model, with or without a head, and closes them."""
    made = []

    def build(head=None, **settings):
        if head is not None:
            folder = written(tmp_path / f"head{len(made)}", *head)
            settings = {
                "speculation": "eagle", "draft_model": folder, "max_drafts": 4,
                "adaptive_drafts": False,
            } | settings  # fmt: skip
        settings = {"backend": "reference", "max_batch": 4, "context": 128} | settings
        checkpoint = MemoryCheckpoint(*target)
        language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
        engine = InferenceEngine(language, bytes_as_tokens(), EngineConfig(**settings))
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def proposals(engine):
    """Record (tokens, proposal) of each query of an engine's drafter."""
    drafter, seen = engine.speculation.drafter, []
    propose = drafter.propose

    def recording(queries):
        texts = [tuple(query.tokens) for query in queries]
        answers = propose(queries)
        seen.extend(zip(texts, map(list, answers), strict=True))
        return answers

    drafter.propose = recording
    return seen


@pytest.mark.parametrize(
    "settings", [{}, {"token_budget": 7}, {"max_batch": 1}], ids=str
)
def test_outputs_are_those_without_drafts(make, head, settings):
    plain = told(outputs(make(**settings), VOCAB))
    engine = make(head, **settings)
    assert told(outputs(engine, VOCAB)) == plain
    assert engine.speculation.drafted > 50


@pytest.mark.parametrize("settings", [{}, {"token_budget": 7}], ids=str)
def test_drafts_are_those_of_a_plain_model(make, target, head, settings):
    engine = make(head, dtype="float64", **settings)
    seen = proposals(engine)
    outputs(engine, VOCAB)
    model = PlainHead(target, head)
    found = [(text, answer) for text, answer in seen if answer]
    assert len(found) > 50
    for text, answer in found[::7]:
        assert answer == model.drafts(text, len(answer)), f"after {len(text)} tokens"
