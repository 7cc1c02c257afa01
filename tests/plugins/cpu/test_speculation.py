"""Speculation changes no output of the native backend."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from drafted import REQUESTS, assert_equal_outputs, assert_guided_drafts
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

VOCAB = 96


@pytest.fixture
def made(backend):
    """Returns a function that returns one that makes engines of a depth."""
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=VOCAB))
    language = LanguageModel(MODEL, MODEL.config(files.config), files)
    engines = []

    def make(depth, speculates, drafter):
        config = EngineConfig(
            max_batch=4, context=96, dtype="float32", depth=depth,
            speculation="ngram" if speculates else None, max_drafts=4,
            adaptive_drafts=False,
        )  # fmt: skip
        runner = start_runner(language, backend, config)
        engines.append(
            InferenceEngine(language, None, config, runner=runner, drafter=drafter)
        )
        return engines[-1]

    yield lambda depth: partial(make, depth)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("acceptance", [0.6, None], ids=["synthetic", "ngram"])
def test_drafts_change_no_output(made, acceptance, depth):
    requests = [
        {name: value for name, value in options.items() if name != "stop"}
        for options in REQUESTS
    ]
    speculation = assert_equal_outputs(made(depth), VOCAB, acceptance, requests)
    assert speculation.drafted > speculation.accepted > 5


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_output_of_a_grammar(made, depth):
    most, total = assert_guided_drafts(made(depth), VOCAB)
    assert most > 1
    assert total > 15
