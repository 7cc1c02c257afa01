"""Adapters at a worker, at ranks, at a replaced worker and in a replayed trace."""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend, Rendezvous, ThreadCollectives
from inl.device import Device
from inl.errors import CheckpointError
from inl.executor.model_loader import open_model
from inl.protocol.runner import AdapterSource, Limits
from inl.recording.recorder import MAX_LARGE_BYTES, STEPS, Recorder
from inl.recording.replay import replay
from inl.recording.trace_file import RunHeader, read_trace
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner
from inl.runners.startup import start
from inl.testing.tiny import tiny_llama
from lora_files import LoraFiles

HF, TENSORS = tiny_llama(np.random.default_rng(7))
PROMPT = list(range(3, 23))
HERE = EngineConfig(
    backend="reference", dtype="float32", context=64, sampling="greedy",
    max_adapters=2, max_adapter_rank=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and two adapters of it."""
    root = tmp_path_factory.mktemp("folders")
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(HF))
    save_file(TENSORS, root / "model" / "model.safetensors")
    for name, seed in (("one", 1), ("two", 2)):
        LoraFiles(TENSORS, seed=seed).write(root / name)
    return root


def answers(engine, names=(None, "one", "two")):
    handles = [engine.submit(PROMPT, max_tokens=6, adapter=name) for name in names]
    while not all(handle.completed for handle in handles):
        engine.step()
    return [handle.completion().token_ids for handle in handles]


def opened(folders, **settings):
    config = {field: getattr(HERE, field) for field in HERE.__slots__} | settings
    return InferenceEngine(open_model(folders / "model"), config=EngineConfig(**config))


@pytest.fixture(scope="module")
def expected(folders):
    """Answers of the base and of both adapters, computed here."""
    with opened(folders) as engine:
        engine.load_adapter("one", folders / "one")
        engine.load_adapter("two", folders / "two")
        found = answers(engine)
    assert len(set(found)) == 3
    return found


def worker(folders, **settings):
    return opened(folders, backend=f"worker:{sys.executable}/reference", **settings)


def test_a_worker_loads_adapters_and_refuses_bad_ones(folders, expected, monkeypatch):
    with worker(folders, adapters={"one": folders / "one"}) as engine:
        bad = AdapterSource(2, str(folders / "two"), "0" * 64)
        with pytest.raises(CheckpointError, match=r"worker .*it has changed meanwhile"):
            engine.core.load_adapter(bad)
        handle = engine.submit(PROMPT, max_tokens=6, adapter="one")
        engine.step()  # steps are in flight now
        engine.load_adapter("two", folders / "two")
        assert answers(engine) == expected
        assert handle.completion().token_ids == expected[1]


def test_a_new_worker_has_the_adapters_of_the_lost_one(folders, expected):
    with worker(folders, on_worker_loss="restart") as engine:
        engine.load_adapter("one", folders / "one")
        engine.load_adapter("two", folders / "two")
        handle = engine.submit(PROMPT, max_tokens=6, adapter="two")
        engine.step()
        os.kill(engine.runner.pid, signal.SIGKILL)
        while not handle.completed:
            engine.step()
        assert handle.completion().token_ids == expected[2]
        assert engine.core.restarts == 1
        assert answers(engine) == expected


def test_ranks_have_their_parts_of_an_adapter(folders, expected):
    rendezvous, language = Rendezvous(2), open_model(folders / "model")

    def make(rank):
        collectives = ThreadCollectives(2, rank, rendezvous)
        backend = ReferenceBackend(
            Device("reference"), dtype="float32", collectives=collectives
        )
        return start_runner(language, backend, HERE, rank=rank)

    runner = RankRunner(make, 2, abort=rendezvous.abort)
    with InferenceEngine(language, config=HERE, runner=runner) as engine:
        engine.load_adapter("one", folders / "one")
        engine.load_adapter("two", folders / "two")
        assert answers(engine) == expected
        source = AdapterSource(1, str(folders / "two"), "0" * 64)
        with pytest.raises(CheckpointError, match="it has changed meanwhile"):
            runner.load_adapter(source)
        assert answers(engine, ("two",)) == expected[2:]


def test_a_trace_is_replayed_with_its_adapters(folders, expected, tmp_path):
    path = tmp_path / "a.trace"
    with opened(folders, trace=path, max_adapters=1) as engine:
        for name, want in (("one", expected[1]), ("two", expected[2])):
            engine.load_adapter(name, folders / name)
            assert answers(engine, (name,)) == [want]
            engine.unload_adapter(name)
    language = open_model(folders / "model")
    outcome = replay(read_trace(path), lambda n: start(language, HERE, limits=n).runner)
    assert (outcome.differences, outcome.sequences) == ([], 2)
    assert outcome.rows >= 12


def test_the_recorder_keeps_adapters_and_bounds_large_frames(tmp_path):
    path = tmp_path / "late.trace"
    limits = Limits(slots=2, blocks=(3,), block_size=16, max_blocks_per_seq=2, vocab=9)
    recorder = Recorder(lambda: RunHeader(limits))
    recorder.add(AdapterSource(1, "former", "a"))
    recorder.add(AdapterSource(1, "latter", "b"))
    for _ in range(2 * STEPS):
        recorder.add(np.zeros(16, np.int32))
    recorder.add(np.zeros(MAX_LARGE_BYTES // 4, np.int32))
    recorder.write(path)
    size = path.stat().st_size
    assert MAX_LARGE_BYTES < size < MAX_LARGE_BYTES + 300_000
    head = path.read_bytes()[:4000]
    assert b"latter" in head
    assert b"former" not in head
    recorder.add(np.zeros(MAX_LARGE_BYTES // 8, np.int32))
    recorder.write(path)
    assert path.stat().st_size < size, "the large frame before was dropped"
