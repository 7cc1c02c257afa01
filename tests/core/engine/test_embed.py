"""Embeddings: hidden states on the weights of the engine, against a float64 model."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.errors import RequestError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama

VOCAB = 96
IDS = [int(each) for each in np.random.default_rng(2).integers(0, VOCAB, 40)]


@pytest.fixture(scope="module")
def weights():
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2)


@pytest.fixture
def engine(weights, request):
    options = {"backend": "reference", "dtype": "float64", "context": 64}
    options |= getattr(request, "param", {})
    checkpoint = MemoryCheckpoint(*weights)
    model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    with InferenceEngine(model, config=EngineConfig(**options)) as engine:
        yield engine


def direction(weights, ids):
    """The logits of a plain model, of length 1."""
    logits = plain_logits(*weights, ids)[-1]
    return logits / np.sqrt(np.square(logits).sum())


def through_the_head(weights, embedding):
    logits = np.asarray(weights[1]["lm_head.weight"], np.float64) @ embedding
    return logits / np.sqrt(np.square(logits).sum())


@pytest.mark.parametrize("engine", [{}, {"token_budget": 16}], indirect=True)
def test_the_head_makes_the_logits_of_it(engine, weights):
    for ids in (IDS, IDS[:1], IDS[:16]):
        (found,) = engine.embed([ids])
        assert found.dtype == np.float32
        assert abs(float(np.square(found, dtype=np.float64).sum()) - 1) < 1e-6
        error = through_the_head(weights, found) - direction(weights, ids)
        assert np.abs(error).max() < 1e-6


def test_one_does_not_depend_on_the_one_before(engine):
    alone = engine.embed([IDS[:9]])
    together = engine.embed([IDS, IDS[:9]])
    assert np.array_equal(together[1], alone[0])
    assert not np.allclose(together[0], alone[0], atol=1e-3)


def test_generation_goes_on_beside_it(engine):
    want = engine.generate(IDS[:8], max_tokens=40).token_ids
    found = []
    thread = threading.Thread(
        target=lambda: found.append(engine.generate(IDS[:8], max_tokens=40))
    )
    thread.start()
    rows = [engine.embed([IDS])[0] for _ in range(8)]
    thread.join(300)
    assert found[0].token_ids == want
    assert all(np.array_equal(rows[0], each) for each in rows)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "no tokens"),
        ([VOCAB], r"prompts\[1\]: found token id 96, accepts 0 to 95"),
        ([-1], "found -1"),
        ([0] * 65, r"prompts\[1\]: found 65 tokens, accepts 1 to 64"),
        (["a"], "accepts token ids"),
    ],
)
def test_bad_input(engine, prompt, match):
    before = engine.embed([IDS])
    with pytest.raises(RequestError, match=match):
        engine.embed([IDS, prompt])
    assert np.array_equal(engine.embed([IDS]), before)


def test_an_interrupted_one_leaves_nothing(engine, monkeypatch):
    before = engine.embed([IDS])
    runner = engine._embedder._runner
    monkeypatch.setattr(runner, "logits", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.embed([IDS])
    assert np.array_equal(engine.embed([IDS]), before)
