"""Engines of a fleet with different LoRA adapters, of the default model."""

from __future__ import annotations

import numpy as np
import pytest

from fleets import TEXT, EngineProcess, Fleet
from inl import EngineConfig
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.hub.resolve import default_model
from inl.engine.inference_engine import InferenceEngine
from lora_files import LoraFiles
from waiting import until

PROMPT = "The river runs"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random adapters; two of them have one name."""
    checkpoint = open_checkpoint(default_model())
    shapes = {name: np.empty(checkpoint.spec(name)[1]) for name in checkpoint.names()}
    checkpoint.close()
    folder = tmp_path_factory.mktemp("adapters")
    return [
        str(
            LoraFiles(shapes, seed=seed, targets=("q", "v"), alpha=40.0).write(
                folder / str(seed)
            )
        )
        for seed in range(2)
    ]


ROOM = {"max_adapters": 1, "max_adapter_rank": 4, "context": 128}


def options(adapters):
    return {"is_real": True, "max_batch": 2, "config": ROOM, "adapters": adapters}


def tokens(fleet, model):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    status, _, found = fleet.send("POST", TEXT, {**body, "return_token_ids": True})
    assert status == 200, found
    return found["choices"][0]["token_ids"]


def own_tokens(folder):
    """Return what engines without a fleet generate, without and with an adapter."""
    config = EngineConfig(backend="cpu", max_batch=2, adapters={"poet": folder}, **ROOM)
    with InferenceEngine.from_pretrained(None, config) as engine:
        return [
            engine.generate(
                PROMPT, max_tokens=12, temperature=0, adapter=name
            ).token_ids
            for name in (None, "poet")
        ]


@pytest.mark.full
def test_requests_of_an_adapter_go_where_it_is_loaded(folders, monkeypatch):
    plain, adapted = map(list, own_tokens(folders[0]))
    assert plain != adapted
    with (
        EngineProcess(**options({})) as bare,
        EngineProcess(**options({"poet": folders[0]})) as poet,
        EngineProcess(**options({"poet": folders[1]})) as other,
        Fleet([bare.address]) as fleet,
    ):

        def names():
            return [each["id"] for each in fleet.send("GET", "/v1/models")[2]["data"]]

        def rows():
            return fleet.send("GET", "/load")[2]["replicas"]

        assert names() == ["hash"]
        fleet.add(poet.address)
        until(lambda: [each["state"] for each in rows()][1:] == ["ready"])
        assert names() == ["hash", "poet"]
        # Another adapter of the name is no part of the fleet.
        fleet.add(other.address)
        until(lambda: [each["state"] for each in rows()][2:] == ["refused"])
        assert "adapter poet: " in rows()[2]["reason"]
        for _ in range(4):
            assert tokens(fleet, "poet") == adapted
            assert tokens(fleet, "hash") == plain
        # Without the engine that has it, nothing else answers.
        poet.kill()
        until(lambda: rows()[1]["state"] == "absent")
        assert tokens(fleet, "hash") == plain
        monkeypatch.setattr("inl.fleet.client.START_SECONDS", 0.1)
        body = {"model": "poet", "prompt": PROMPT}
        status, headers, found = fleet.send("POST", TEXT, body)
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert "none has adapter poet" in found["error"]["message"]
