"""Ctrl-C during the native backend's steps."""

from __future__ import annotations

import signal
from contextlib import suppress
from random import Random

import numpy as np
import pytest

from depth import SEED
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from interrupts import PACKAGES, Alarm, Injector

pytestmark = [
    pytest.mark.skipif(
        not hasattr(signal, "setitimer"), reason="this system has no timer"
    ),
    # Python drops an exception that is raised in __del__.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def alarms():
    """Interrupts at times of the clock, also within calls of the library."""
    random = Random(SEED)
    for _ in range(60):
        yield Alarm(random.uniform(0.0005, 0.02))


def injections(call, count=15):
    """Interrupts at lines of the core and of the backend, the same in every run."""
    lines = {"events": "lines", "packages": (*PACKAGES, "inl_cpu.")}
    with Injector(**lines) as counter:
        call()
    for at in range(1, counter.count, counter.count // count):
        yield Injector(at, **lines)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "kind", ["lines", pytest.param("alarms", marks=pytest.mark.long)]
)
def test_the_next_answer_is_right(monkeypatch, kind):
    monkeypatch.setenv("INL_CPU", "native")
    checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=256))
    checkpoint.eos_token_ids = ()
    model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    config = EngineConfig(backend="cpu", context=96, dtype="float32")
    prompts = [[1, 2, 3], [4] * 40]
    with InferenceEngine(model, config=config) as engine:
        wanted = [each.token_ids for each in engine.generate(prompts, max_tokens=30)]

        def call():
            engine.generate(prompts, max_tokens=50)

        for interrupt in injections(call) if kind == "lines" else alarms():
            with suppress(KeyboardInterrupt), interrupt:
                call()
            found = engine.generate(prompts, max_tokens=30)
            assert [each.token_ids for each in found] == wanted
        programs = engine.runner._backend.programs
        caches = {id(each.state[0][0]) for each in programs.values()}
        assert len(caches) == 1, "programs keep the cache of an interrupted step"
