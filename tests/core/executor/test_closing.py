"""A runner that is closed returns the memory of its device."""

from __future__ import annotations

import weakref

import numpy as np

from inl.backend.base import CachedMemory
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama

LIMITS = Limits(
    slots=2, blocks=(4,), block_size=4, max_blocks_per_seq=3, vocab=96, depth=1
)


def test_memory_is_released_after_the_weights_are_dropped(monkeypatch):
    alive = []

    def release():
        alive.append([each() is not None for each in weights])

    offers = ReferenceBackend.offers
    monkeypatch.setattr(
        ReferenceBackend,
        "offers",
        lambda self, kind: (
            CachedMemory(release) if kind is CachedMemory else offers(self, kind)
        ),
    )
    checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5)))
    runner = local_runner(
        ReferenceBackend(Device("reference:0")), MODEL, checkpoint, LIMITS
    )
    weights = [weakref.ref(each) for each in leaves(runner.loaded.weights)]
    assert len(weights) > 4
    runner.close()
    runner.close()
    assert alive == [[False] * len(weights)]
