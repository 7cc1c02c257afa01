"""Adapters of every family: logits equal those of a model with merged weights."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from inl import EngineConfig
from inl.adapters.folder import Adapter, LoraPair
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.plugin.builtin import FAMILIES
from inl.runners.local_runner import start_runner
from inl.spec.message import admit_frame
from inl.testing.play import one_step
from inl.testing.tiny import MemoryCheckpoint

NAMES = sorted({module for _, _, module in FAMILIES})
IDS = [3, 17, 60, 2, 41, 41, 9, 77, 5, 30]
CONFIG = EngineConfig(
    backend="reference", dtype="float64", max_batch=4, context=32, sampling="greedy",
    max_adapters=2, max_adapter_rank=3,
)  # fmt: skip


def logits(model, files, adapter=None, number=0):
    """Logits after a prompt, and after one more token."""
    language = LanguageModel(model, model.config(files.config), files)
    backend = ReferenceBackend(Device("reference"), dtype="float64")
    runner = start_runner(language, backend, CONFIG)
    if adapter is not None:
        made = adapter(runner.loaded.adapters.modules)
        runner.executor.load_adapter(2, made)
    limits = runner.limits
    frame = admit_frame(
        1, [[1, 2]] * limits.groups, groups=limits.groups, adapter=number,
        max_blocks_per_seq=limits.max_blocks_per_seq,
    )  # fmt: skip
    runner.submit(frame)
    found = []
    for step, ids in enumerate((IDS[:-1], IDS[-1:])):
        frame = one_step(limits, [(1, ids)], step=step, decoding=step)
        found.append(runner.logits(frame).data[0])
    runner.close()
    return np.array(found), made if adapter else None


def drawn(modules):
    rng = np.random.default_rng(4)
    pairs = {
        name: LoraPair(
            rng.standard_normal((3, columns)).astype(np.float32) / columns**0.5,
            rng.standard_normal((rows, 3)).astype(np.float32),
        )
        for name, (rows, columns) in modules.items()
    }
    return Adapter("drawn", "digest", pairs)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_merged_weights(name, random_checkpoint):
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_checkpoint(model, name)
    found, adapter = logits(model, files, drawn, number=2)
    assert any(module.endswith("o_proj") for module in adapter.modules)
    merged = {
        each: files.tensor(each).data.astype(np.float64) for each in files.names()
    }
    for module, (a, b) in adapter.modules.items():
        merged[f"{module}.weight"] += b.astype(np.float64) @ a.astype(np.float64)
    wanted, _ = logits(model, MemoryCheckpoint(files.config, merged))
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-8)
    plain, _ = logits(model, files, drawn)
    assert np.abs(plain - wanted).max() > 1e-3
