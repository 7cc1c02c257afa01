"""Recorded programs of encoders: a few sizes serve all batches, with equal results."""

from __future__ import annotations

import numpy as np
import pytest

from inl.config import EngineConfig
from inl.executor import encoder_executor
from inl.executor.encoder_executor import EXACT, load_encoder
from inl.executor.model_loader import LanguageModel
from inl.models import bert
from inl.runners.encoder_runner import EncoderRunner
from inl.spec.encoder import TokenSequence
from inl.testing.tiny import MemoryCheckpoint
from inl.testing.tiny_encoder import plain_encoding, tiny_bert
from inl_cpu import encoder_program
from inl_cpu.encoder_program import RecordedBatch, size_of
from inl_cpu.instructions import Add, LayerNorm

BATCHES = ([3], [3], [20, 2], [38, 30, 7], [40, 40], [39, 40], [5], [1] * 20, [3, 3, 3])


def encoder(backend, weights):
    """A tiny BERT on a backend; the oracle of one sequence."""
    hf, tensors = tiny_bert(np.random.default_rng(weights))
    config = bert.MODEL.config(hf)
    model = LanguageModel(bert.MODEL, config, MemoryCheckpoint(hf, tensors))
    options = EngineConfig(backend="cpu", dtype="float32")
    runner = EncoderRunner(load_encoder(model, backend, options))
    return runner, lambda ids: plain_encoding(hf, tensors, ids, "mean", unit=True)


@pytest.fixture
def recordings(monkeypatch):
    """The recordings that are made, in order."""
    made = []

    class Noted(RecordedBatch):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(encoder_program, "RecordedBatch", Noted)
    return made


def test_batches_of_a_size_share_a_recording(backend, rng, recordings):
    runner, oracle = encoder(backend, weights=3)
    for lengths in BATCHES:
        ids = [rng.integers(0, 96, length).tolist() for length in lengths]
        found = runner.encode([TokenSequence(each) for each in ids])
        assert found.shape[0] == len(lengths)
        assert np.abs(found - [oracle(each) for each in ids]).max() < 1e-5
    sizes = {size_of(sum(lengths), len(lengths)) for lengths in BATCHES}
    assert len(recordings) == len(sizes) < len(BATCHES) - 1
    # Additions before a norm are part of it.
    steps = recordings[0]._steps.steps
    assert sum(isinstance(step, LayerNorm) for step in steps) == 5
    assert sum(isinstance(step, Add) for step in steps) == 1


def test_recordings_are_of_the_weights_that_are_given(backend, recordings):
    (first, oracle), (second, other) = (encoder(backend, weights=n) for n in (3, 4))
    ids = [5, 6, 7]
    program = first.executor.program(EXACT)
    batch = encoder_executor.padded([TokenSequence(ids)], first.executor.bucket(3, 1))
    for runner, expected in ((first, oracle), (second, other), (first, oracle)):
        (row,) = program(runner.executor.loaded.weights, batch)
        assert np.abs(row[0] - expected(ids)).max() < 1e-5
    assert len(recordings) == 3


def test_the_least_recently_used_recordings_are_dropped(
    backend, recordings, monkeypatch
):
    monkeypatch.setattr(encoder_program, "MAX_PROGRAMS", 2)
    runner, _ = encoder(backend, weights=3)
    for length in (1, 4, 2, 5, 2, 3):
        runner.encode([TokenSequence([4] * length)])
    assert len(recordings) == 4
