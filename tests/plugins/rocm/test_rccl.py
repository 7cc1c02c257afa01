"""Ranks on AMD GPUs: the library that they ask for, its absence, and their answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import distributed

from inl.backend.base import Rank, Ranks
from inl.config import EngineConfig
from inl.device import Device
from inl.engine.core import EngineCore
from inl.errors import BackendUnavailable
from inl.executor.model_loader import open_model
from inl.runners import rank_startup
from inl.runners.startup import start
from inl.scheduling.request import Request
from inl.testing.tiny import plain_logits, tiny_llama
from inl_rocm.backend import RocmBackend

PROMPTS = [[5, 17, 80, 3, 44, 9], [61]]
COUNT = 8
RANK = Rank(0, 2, "127.0.0.1:1", 1.0)


@pytest.fixture
def ranks(monkeypatch):
    """What a backend on an AMD GPU offers for ranks; there is no GPU behind it."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    backend = object.__new__(RocmBackend)
    backend.device, backend.place = Device("rocm:0"), torch.device("cuda", 0)
    monkeypatch.setattr(RocmBackend, "uses_triton", lambda _self: False)
    return backend.offers(Ranks)


class Joined(Exception):
    """Raised in place of joining a group."""


def test_the_group_is_one_of_rccl(ranks, monkeypatch):
    asked = SimpleNamespace()

    def join(library, **options):
        vars(asked).update(options, library=library)
        raise Joined

    monkeypatch.setattr(distributed, "TCPStore", lambda *_: None)
    monkeypatch.setattr(distributed, "is_backend_available", lambda _name: True)
    monkeypatch.setattr(distributed, "init_process_group", join)
    with pytest.raises(Joined):
        ranks.joining(RANK)
    assert (asked.library, asked.device_id) == ("nccl", torch.device("cuda", 0))
    assert (asked.rank, asked.world_size) == (0, 2)


def test_a_torch_without_rccl_is_refused(ranks, monkeypatch):
    monkeypatch.setattr(distributed, "is_backend_available", lambda _name: False)
    with pytest.raises(BackendUnavailable) as caught:
        ranks.joining(RANK)
    assert str(caught.value) == (
        f"rocm:0: torch {torch.__version__} is built without RCCL, over which ranks "
        "exchange tensors; accepted: tensor_parallel=1, or a build with it"
    )


@pytest.mark.full
def test_two_ranks_answer_as_a_whole_model(monkeypatch, tmp_path):
    config, tensors = tiny_llama(np.random.default_rng(21), kv_heads=4, bias=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("INL_THREADS", "1")
    monkeypatch.setattr(rank_startup, "FACTORY", "simulated_rocm:serve")
    engine = EngineConfig(
        backend=f"worker:{sys.executable}/rocm:0", tensor_parallel=2, context=128,
        dtype="float32", cache_bytes=1 << 20, worker_seconds=60,
    )  # fmt: skip
    core = EngineCore(start(open_model(tmp_path), engine).runner)
    requests = [Request(ids, max_tokens=COUNT) for ids in PROMPTS]
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            assert not [event.error for event in core.step() if event.error]
    finally:
        core.runner.close()
    for request in requests:
        exact = plain_logits(config, tensors, request.tokens[:-1])[-COUNT:]
        assert request.output_ids == list(exact.argmax(-1))
