"""Norms of all heads of queries and keys together, which attention does not fuse."""

from __future__ import annotations

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models import olmoe
from plain_byte_tokens import plain_bytes_as_tokens
from random_families import random_family


@pytest.mark.parametrize("heads", [2, 6])
def test_steps_of_one_row_normalize_all_heads_together(heads):
    model = olmoe.MODEL
    files = random_family(model, "olmoe", num_key_value_heads=heads, vocab_size=256)
    language = LanguageModel(model, model.config(files.config), files)
    prompt = np.random.default_rng(3).integers(0, 256, 9).tolist()

    def answer(**settings):
        config = EngineConfig(context=64, max_batch=1, **settings)
        with InferenceEngine(language, plain_bytes_as_tokens(), config) as engine:
            found = engine.generate(prompt, max_tokens=20, ignore_eos=True)
        return found.token_ids

    exact = answer(backend="reference", dtype="float64")
    assert len(set(exact)) > 5
    assert answer(backend="cpu", dtype="float32") == exact
