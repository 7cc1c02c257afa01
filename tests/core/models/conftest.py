"""Tiny models of any architecture, with random weights under their stored names."""

from __future__ import annotations

import numpy as np
import pytest

from inl.spec.tree import leaves
from inl.weights.sources import stored_tensors

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
        hf, rng = SIZES | fields, np.random.default_rng(seed)
        tensors = {}
        for group in leaves(model.weights(model.config(hf))):
            for param in group.params.values():
                for name, shape in stored_tensors(param).items():
                    numbers = 1.4 * rng.standard_normal(shape) / shape[-1] ** 0.5
                    if len(shape) == 1:
                        numbers = 1 + 0.3 * rng.standard_normal(shape)
                    tensors.setdefault(name, numbers.astype(np.float32))
        return hf, tensors

    return make
