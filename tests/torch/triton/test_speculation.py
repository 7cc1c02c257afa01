"""Speculation changes no output of Triton kernels."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from triton_place import IS_SLOW, PLACE

from drafted import REQUESTS, assert_equal_outputs
from inl import EngineConfig, InferenceEngine
from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

# isort: split
from inl_torch import triton
from inl_torch.backend import TorchBackend
from inl_torch.gpu.capture_sizes import capture_sizes
from inl_torch.triton.tuning import Tuning

VOCAB = 40
COUNT = 8
FILTERED = () if IS_SLOW else REQUESTS[2:4]
"""With filters and penalties, which take a minute in the interpreter."""


@final
class Kernels(TorchBackend):
    """Triton kernels and the step sizes of a GPU, without graphs."""

    traits = Traits(dtypes=("float32",), depth=2)

    def __init__(self):
        self.device, self.place = Device("cpu:0"), torch.device(PLACE)

    def memory(self):
        return host_memory()

    def kernels(self):
        yield from super().kernels()
        yield from triton.kernels(Tuning(processors=1, max_rows=8, filters=True))

    def buckets(self, limits):
        return capture_sizes(limits)


def test_drafts_change_no_output():
    rng = np.random.default_rng(5)
    files = MemoryCheckpoint(
        *tiny_llama(rng, layers=1, heads=2, kv_heads=1, vocab=VOCAB)
    )
    language = LanguageModel(MODEL, MODEL.config(files.config), files)
    requests = [
        {"max_tokens": COUNT}, {"max_tokens": COUNT, "temperature": 0.8, "seed": 3},
        *({**options, "max_tokens": COUNT} for options in FILTERED),
    ]  # fmt: skip
    engines = []

    def make(speculates, drafter):
        config = EngineConfig(
            max_batch=2, context=64, dtype="float32", max_drafts=3,
            speculation="ngram" if speculates else None, adaptive_drafts=False,
            sampling="sample_filtered" if FILTERED else "sample",
        )  # fmt: skip
        runner = start_runner(language, Kernels(), config)
        engines.append(
            InferenceEngine(language, None, config, runner=runner, drafter=drafter)
        )
        return engines[-1]

    try:
        speculation = assert_equal_outputs(make, VOCAB, 0.4, requests)
    finally:
        for engine in engines:
            engine.close()
    assert speculation.drafted > speculation.accepted > 0
