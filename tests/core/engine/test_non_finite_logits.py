"""NaN in the weights: it ends the requests that meet it, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.errors import CheckpointError, NonFiniteLogits
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint

BAD = 7
"""The token whose embedding is NaN."""

SAMPLING = {
    "greedy": {},
    "sample": {"temperature": 0.8, "seed": 3},
    "sample_filtered": {"temperature": 0.8, "seed": 3, "top_k": 5, "logprobs": 2},
}


@pytest.fixture
def opened(tiny_made):
    """Makes engines on the tiny model, with a NaN in row ``bad`` of the embedding."""
    made = []

    def make(bad, **settings):
        config, tensors = tiny_made
        table = tensors["model.embed_tokens.weight"].copy()
        if bad is not None:
            table[bad, 5] = np.nan
        checkpoint = MemoryCheckpoint(
            config, tensors | {"model.embed_tokens.weight": table}
        )
        language = LanguageModel(MODEL, MODEL.config(config), checkpoint)
        settings = {"backend": "reference", "max_batch": 3, "context": 48} | settings
        engine = InferenceEngine(language, None, EngineConfig(**settings))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def test_loading_refuses_the_weights_by_name(opened):
    message = rf"embed_tokens.weight: found nan at \[{BAD}, 5\]"
    with pytest.raises(CheckpointError, match=message):
        opened(BAD)


@pytest.mark.parametrize("sampler", SAMPLING)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_only_its_own_request_ends(opened, sampler, prefix_cache):
    options = {"max_tokens": 6, "ignore_eos": True} | SAMPLING[sampler]
    good = [[20, 21, 22], [40, 41, 42, 43, 44, 45, 46]]
    clean = opened(None)
    expected = [out.token_ids for out in clean.generate(good, **options)]
    engine = opened(BAD, check_weights=False, prefix_cache=prefix_cache)
    for _ in range(5):  # blocks that held NaN are used again
        handles = [engine.submit(each, **options) for each in (*good, [8, BAD, 9])]
        while not all(handle.completed for handle in handles):
            engine.step()
        assert [handle.completion().token_ids for handle in handles[:2]] == expected
        with pytest.raises(NonFiniteLogits, match=r"after token 3 \(prompt 3\)"):
            handles[2].completion()
        assert handles[2].finish_reason == "error"
