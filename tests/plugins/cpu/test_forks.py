"""The native backend in forked children: they start their own threads."""

from __future__ import annotations

import os

import pytest

from forking import run_script

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system has no fork"
)

SCRIPT = """
import os, sys, threading
import numpy as np
from forking import fork_all
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=256))
checkpoint.eos_token_ids = ()
config = EngineConfig(backend="cpu", context=96, dtype="float32")
model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
engine = InferenceEngine(model, config=config)
prompts = [[at, 7, 9] for at in range(6)]
answers = [each.token_ids for each in engine.generate(prompts, max_tokens=40)]

def check(at):
    assert engine.generate(prompts[at], max_tokens=40).token_ids == answers[at]

def serve(index):
    before = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 0
    check(index)
    after = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 3
    if sys.argv[1] == "native":
        assert after - before == 3, (before, after)
    engine.close()

# The pool may be computing for another thread at the time of the fork.
stopping = threading.Event()

def compute():
    while not stopping.is_set():
        check(5)

other = threading.Thread(target=compute, daemon=True)
other.start()
wait = fork_all(4, serve)
check(4)
assert wait() == [0] * 4, "a child has failed"
stopping.set()
other.join()
check(1)
print("done")
"""


@pytest.mark.parametrize(
    "name", ["native", pytest.param("torch", marks=pytest.mark.full)]
)
def test_parent_and_children_compute_the_same(request, monkeypatch, name):
    if name == "native":
        request.getfixturevalue("backend")  # skips without the library
    else:
        pytest.importorskip("torch")
    monkeypatch.setenv("INL_THREADS", "4")
    monkeypatch.setenv("INL_CPU", name)
    assert run_script(SCRIPT, name) == "done\n"
