"""Progress reports of loading, with a slow fake packer."""

from __future__ import annotations

import time
from typing import final

import numpy as np
import pytest

from inl import EngineConfig
from inl.backend.base import Backend
from inl.backend.reference import ReferenceBackend
from inl.backend.weight_cache import WeightCache
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.progress import LoadStage, ProgressReporter
from inl.runners.local_runner import start_runner
from inl.spec.kernel import Kernel
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import plan_weights

PACK_SECONDS = 0.02
LAYOUT = "slow tiles"


@pytest.fixture
def language():
    config, tensors = tiny_llama(np.random.default_rng(3))
    checkpoint = MemoryCheckpoint(config, tensors)
    return LanguageModel(MODEL, MODEL.config(config), checkpoint)


def test_each_packed_group_is_reported_in_bytes(language):
    events = []

    def pack(group, backend, dtype):
        time.sleep(PACK_SECONDS)
        events.append("packed")
        return tuple(group.values())

    packer = Kernel("linear", "slow", run=pack, layout=LAYOUT, pack=pack)
    checkpoint = language.checkpoint
    groups = plan_weights(
        MODEL.weights(language.config), (packer,), stored_specs(checkpoint)
    )
    backend = ReferenceBackend(Device("reference"))
    load_weights(
        groups, checkpoint, backend, "float32",
        progress=lambda *report: events.append(report),
    )  # fmt: skip
    packed = [number for number, event in enumerate(events) if event == "packed"]
    assert len(packed) == sum(one.layout == LAYOUT for one in leaves(groups)) > 1
    for number in packed:
        (before, _), (after, _) = events[number - 1], events[number + 1]
        assert after > before
    reports = [event for event in events if event != "packed"]
    total = sum(checkpoint.tensor(name).data.nbytes for name in checkpoint.names())
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert len(reports) == 1 + len(list(leaves(groups)))


@final
class Caching(ReferenceBackend, WeightCache):
    """A backend with an empty weight cache."""

    def offers(self, kind: type) -> object:
        return self if kind is WeightCache else super().offers(kind)

    def load(self, files, dtype, load, progress):
        progress.stage = LoadStage.PACKING
        return load()


def test_stages_of_a_start_with_an_empty_cache(language):
    reports = []
    backend: Backend = Caching(Device("reference"))
    config = EngineConfig(context=32, max_batch=1, warm_up=True)
    start_runner(language, backend, config, progress=lambda *one: reports.append(one))
    stages = [stage for _, _, stage in reports]
    assert list(dict.fromkeys(stages)) == [
        LoadStage.LOADING,  # before the cache lookup
        LoadStage.PACKING,
    ]
    assert stages == sorted(stages, key=list(LoadStage).index)
    packing = LoadStage.PACKING
    counts = [(done, total) for done, total, stage in reports if stage is packing]
    assert counts[0][0] == 0
    assert counts[-1][0] == counts[-1][1]
    assert counts == sorted(counts)


def test_a_reporter_without_a_callback():
    report = ProgressReporter()
    report(1, 2)
    assert report.stage is LoadStage.LOADING
