"""Random checkpoints of any family, from the weights that its model declares."""

from __future__ import annotations

import numpy as np
import pytest

from inl.executor.model_loader import LanguageModel
from inl.models import deep
from inl.testing.tiny import MemoryCheckpoint
from inl.weights.load import stored_specs
from inl.weights.plan import check_tensors, plan_weights
from random_families import drawn, random_family

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def random_model():
    """Makes (config, tensors by name) for a model and fields of its config."""

    def make(model, seed=0, **fields):
        hf = SIZES | fields
        return hf, drawn(model, hf, np.random.default_rng(seed))

    return make


@pytest.fixture(scope="session")
def random_checkpoint():
    """(model, its name, changed fields) -> a checkpoint, the same each time."""

    return random_family


@pytest.fixture(scope="session")
def opened():
    """Returns an ``open_model`` that takes a config and tensors instead of files."""

    def open_made(config, tensors, model=deep.MODEL):
        stored = MemoryCheckpoint(config, tensors)
        shaped, checkpoint = model.adapt(model.config(config), stored)
        held = stored_specs(checkpoint)
        groups = plan_weights(model.weights(shaped), (), held)
        check_tensors(groups, held, "memory")
        return LanguageModel(model, shaped, checkpoint)

    return open_made


@pytest.fixture
def like_plainly(recorded, opened, plain_deep, apart):
    """How far a variant's logits are from those of the plain model."""

    def measure(config, tensors, plain=None, *, highway=0.1):
        language = opened(config, tensors)
        known = recorded("inl-v013", "reference", language=language)
        ids = known.prompts[2]
        fed = known.runner()
        fed.admit(1)
        (found,) = fed((1, ids))
        model = plain_deep(config, plain or tensors, highway=highway)
        return apart(found, np.array([model.feed(token) for token in ids]))

    return measure
