"""Embeddings: hidden states on the weights of the engine, against a float64 model."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle_heads import random_head, written
from inl import EngineConfig, InferenceEngine
from inl.dtypes import widen, wrap
from inl.engine.core import EngineCore
from inl.engine.embedder import PooledRequest
from inl.errors import ProtocolError, RequestError
from inl.executor.model_loader import LanguageModel, open_model
from inl.models.llama import MODEL
from inl.recording.replay import replay
from inl.recording.trace_file import read_trace
from inl.runners.startup import start
from inl.scheduling.request import StepKind
from inl.spec.limits import Limits
from inl.spec.message import HEADER_WORD, MASKED, POOLED, header
from inl.spec.step import INVALID_TOKEN
from inl.testing.hash_runner import HashRunner
from inl.testing.play import one_step
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


PLACES = {
    "here": {},
    "in a worker": {"backend": f"worker:{sys.executable}/reference"},
    "on the native CPU backend": {"backend": "cpu"},
    "with room for adapters": {"max_adapters": 1, "max_adapter_rank": 2},
    "without a cache": {"use_kv_cache": False},
    "speculating": {"speculation": "ngram", "adaptive_drafts": False},
}


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config, tensors = weights
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.float32(tensor) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def opened(folder, **options):
    fields = {"backend": "reference", "dtype": "float32", "context": 64} | options
    return InferenceEngine(open_model(folder), config=EngineConfig(**fields))


@pytest.mark.parametrize("place", PLACES)
def test_texts_of_any_length_are_computed_together(weights, folder, place):
    if place == "on the native CPU backend":
        pytest.importorskip("inl_cpu")
    texts = [IDS, IDS[:9], IDS[3:4], IDS[:33], [*IDS, *IDS[:24]]]
    with opened(folder, **PLACES[place]) as engine:
        rows = engine.embed(texts)
        assert engine.stats.steps <= 2, "a step of all, or one that waits for a prefix"
        again = engine.embed(texts)
        if engine.config.use_kv_cache:
            assert engine.stats.prefix_hit_tokens >= 64
        generated = engine.generate(IDS, max_tokens=4).token_ids
    for text, row, other in zip(texts, rows, again, strict=True):
        error = through_the_head(weights, row) - direction(weights, text)
        assert np.abs(error).max() < 1e-5
        assert np.abs(other - row).max() < 1e-5
    with opened(folder) as engine:
        assert engine.generate(IDS, max_tokens=4).token_ids == generated


def test_steps_of_texts_and_of_generation_take_turns(engine):
    """Neither waits for the end of the other."""
    kinds = []
    handle = engine.submit(IDS[:8], max_tokens=30)
    engine.step()
    core, submitted = engine.core, engine.core.scheduler.plan

    def plan():
        made = submitted()
        if made.chunks:
            kinds.append(made.kind is StepKind.POOLED)
            assert len({chunk.request.pooled for chunk in made.chunks}) == 1
        return made

    core.scheduler.plan = plan
    long = [int(each) for each in np.random.default_rng(4).integers(0, VOCAB, 64)]
    core.scheduler.buckets.tokens = 8  # chunks of a prompt
    engine.embed([long])
    assert kinds.count(True) == 8
    assert all(one != other for one, other in pairwise(kinds[:15])), kinds
    while not handle.completed:
        engine.step()
    assert len(handle.token_ids) == 30


def test_a_trace_of_texts_is_replayed_and_compared(folder, tmp_path):
    path = tmp_path / "a.trace"
    with opened(folder, trace=path, token_budget=16) as engine:
        engine.embed([IDS, IDS[5:12]])
        engine.generate(IDS[:4], max_tokens=3)
    config = EngineConfig(backend="reference", dtype="float32")

    def replayed(language):
        return replay(
            read_trace(path), lambda limits: start(language, config, limits=limits)[0]
        )

    same = replayed(open_model(folder))
    assert (same.differences, same.skipped) == ([], 0)
    other = open_model(folder)
    tensors = {name: other.checkpoint.tensor(name) for name in other.checkpoint.names()}
    changed = dict(tensors)
    changed["model.norm.weight"] = wrap(-widen(tensors["model.norm.weight"]))
    files = MemoryCheckpoint(other.checkpoint.config, changed)
    found = replayed(replace(other, checkpoint=files)).differences
    assert [each.replayed for each in found[:1]] == [INVALID_TOKEN]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"flags": POOLED | MASKED}, "flags"),
        ({"flags": POOLED, "decode_rows": 1}, "flags"),
        ({"flags": POOLED, "repeat": 2, "tokens_per_row": 1}, "repeat"),
    ],
)
def test_a_pooled_step_of_another_kind_is_refused(words, match):
    frame = one_step(Limits(4, (9,), 4, 4, 96), [(1, [5])], step=1, decoding=0)
    for name, value in words.items():
        frame[getattr(HEADER_WORD, name)] = value
    with pytest.raises(ProtocolError, match=match):
        header(frame)


def test_pooled_prompts_are_token_ids():
    with pytest.raises(RequestError, match="pooled: found embeddings"):
        PooledRequest([0, 0], embeddings={0: np.ones((1, 4))})


def test_a_reply_without_hidden_states_is_refused():
    class Forgets(HashRunner):
        def _collect(self, flight):
            return super()._collect(flight)._replace(hidden=None)

    core = EngineCore(Forgets(Limits(4, (40,), 4, 8, 96)))
    core.add(PooledRequest([1, 2, 3]))
    (event,) = [event for _ in range(2) for event in core.step()]
    assert "found hidden states [], expected [1 or more, H]" in str(event.error)


def test_a_draft_head_shares_no_blocks_of_texts(tmp_path):
    """Its cache would have no entries for them."""
    config, tensors = tiny_llama(np.random.default_rng(5), vocab=VOCAB, layers=3)
    head = random_head(np.random.default_rng(8), config)
    files = MemoryCheckpoint(config, tensors)
    language = LanguageModel(MODEL, MODEL.config(config), files)
    options = {"backend": "reference", "context": 64, "max_batch": 2}
    eagle = {
        "speculation": "eagle", "draft_model": written(tmp_path, *head),
        "adaptive_drafts": False,
    }  # fmt: skip
    answers = []
    for more in ({}, eagle):
        settings = EngineConfig(**options, **more)
        with InferenceEngine(language, config=settings) as engine:
            rows = engine.embed([IDS])
            answers.append(engine.generate(IDS, max_tokens=9).token_ids)
            hits = engine.stats.prefix_hit_tokens
            assert bool(hits) == (not more)
            assert np.allclose(engine.embed([IDS]), rows, atol=1e-5)
    assert answers[0] == answers[1]


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
    monkeypatch.setattr(engine._core, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.embed([IDS])
    monkeypatch.undo()
    assert np.array_equal(engine.embed([IDS]), before)
    assert not engine._core.scheduler.live
