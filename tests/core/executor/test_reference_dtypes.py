"""The reference opened by name stores in the dtype that the engine asks for."""

from __future__ import annotations

import numpy as np
import pytest

from inl.config import EngineConfig
from inl.dtypes import widen, wrap
from inl.errors import RequestError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.plugin import make_backend
from inl.protocol.runner import Limits
from inl.runners.local_runner import start_runner
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, plain_logits

LIMITS = Limits(3, (9,), 16, 4, 256)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def error(tiny_made):
    """Largest error of a prompt's logits against float64, by dtype asked for."""
    hf, tensors = tiny_made

    def measure(dtype):
        language = LanguageModel(MODEL, MODEL.config(hf), MemoryCheckpoint(hf, tensors))
        config = EngineConfig(backend="reference", dtype=dtype)
        runner = start_runner(
            language, make_backend("reference"), config, limits=LIMITS
        )
        found = prompt_logits(runner, IDS)
        want = plain_logits(hf, tensors, IDS)[-1]
        return float(np.abs(found - want).max() / np.abs(want).max())

    return measure


def test_each_dtype_errs_as_much_as_it_stores(error):
    assert error("float64") < 1e-12
    assert 1e-12 < error("float32") < 1e-5
    assert 1e-5 < error("float16") < error("bfloat16") < 0.1
    assert error("auto") == error("float32")


def test_opened_by_name_it_computes_in_float32():
    backend = make_backend("reference")
    assert backend.traits.dtypes == ("float32",)
    x = backend.tensor(wrap(np.ones(3)))
    assert widen(backend.numpy(x)).dtype == np.float32


def test_an_unknown_dtype_is_refused(error):
    with pytest.raises(RequestError, match="found 'int8', accepted: auto, float64"):
        error("int8")
