"""Speculation changes no output of eager torch."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from drafted import REQUESTS, assert_equal_outputs, assert_guided_drafts
from inl import EngineConfig, InferenceEngine
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

torch = pytest.importorskip("torch")
TorchCpuBackend = importlib.import_module("inl_cpu.torch_backend").TorchCpuBackend
VOCAB = 96


@pytest.fixture
def make():
    """Returns a function that makes the engines to compare."""
    backend = TorchCpuBackend(Device("cpu"))
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=VOCAB))
    language = LanguageModel(MODEL, MODEL.config(files.config), files)
    engines = []

    def make(speculates, drafter):
        config = EngineConfig(
            max_batch=4, context=96, dtype="float32",
            speculation="ngram" if speculates else None, max_drafts=4,
            adaptive_drafts=False,
        )  # fmt: skip
        runner = start_runner(language, backend, config)
        engines.append(
            InferenceEngine(language, None, config, runner=runner, drafter=drafter)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_drafts_change_no_output(make):
    requests = [
        {name: value for name, value in options.items() if name != "stop"}
        for options in REQUESTS
    ]
    speculation = assert_equal_outputs(make, VOCAB, 0.6, requests)
    assert speculation.drafted > speculation.accepted > 5


def test_drafts_change_no_output_of_a_grammar(make):
    most, total = assert_guided_drafts(make, VOCAB)
    assert most > 1
    assert total > 15
