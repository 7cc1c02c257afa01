"""``quantize_for_inference`` of a language model."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from inl.errors import RequestError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.optimizers import quantize_for_inference
from inl.testing.tiny import MemoryCheckpoint, tiny_llama


@pytest.fixture
def language():
    rng = np.random.default_rng(3)
    config, tensors = tiny_llama(rng, hidden=64, heads=4, kv_heads=2)
    return LanguageModel(MODEL, MODEL.config(config), MemoryCheckpoint(config, tensors))


def test_the_matrices_are_quantized_and_the_error_is_logged(language, caplog):
    caplog.set_level(logging.INFO, "inl")
    found = quantize_for_inference(language, "int4")
    assert found.quantize == "int4"
    assert found.quantization == language.quantized("int4").quantization
    assert caplog.messages == [found.quantization.describe()]


def test_a_dtype_that_is_not_packed_is_refused(language):
    with pytest.raises(RequestError, match=r"'bf16' for a language model.*int4; it"):
        quantize_for_inference(language, "bf16")
