"""Adapters behind the server: requests use their names as names of models."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest

from http_servers import HashServer
from inl import EngineConfig, InferenceEngine
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.hub.resolve import default_model
from inl.cli.serve_models import make_server
from inl.errors import ModelError, RequestError
from inl.serve.api_error import ApiError
from inl.serve.metrics import Metrics
from inl.serve.model_slot import ModelSource
from inl.serve.models import Models
from inl.serve.served_model import ServedModel
from inl.serve.settings import ServerConfig
from lora_files import LoraFiles

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two random adapters of the default model."""
    checkpoint = open_checkpoint(default_model())
    shapes = {name: np.empty(checkpoint.spec(name)[1]) for name in checkpoint.names()}
    checkpoint.close()
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: LoraFiles(shapes, seed=seed, targets=("q", "v"), alpha=40.0).write(
            folder / name
        )
        for seed, name in enumerate(("poet", "clerk"))
    }
    return EngineConfig(backend="cpu", context=128, max_batch=4, adapters=adapters)


class AdapterServer(HashServer):
    """A server of the default model and its adapters."""

    def __init__(self, engine):
        super().__init__()
        self.engine_config = engine

    def make(self):
        return make_server([("base", None)], self.config, self.engine_config)

    def tokens(self, model):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        status, _, answer = self.send(
            "POST", "/v1/completions", {**body, "return_token_ids": True}
        )
        assert status == 200, answer
        assert answer["model"] == model
        return answer["choices"][0]["token_ids"]


def test_names_of_adapters_are_names_of_models(config):
    names = ("base", "poet", "clerk")
    with InferenceEngine.from_pretrained(config=config) as engine:
        wanted = {
            name: list(
                engine.generate(
                    PROMPT, max_tokens=8, adapter=None if name == "base" else name
                ).token_ids
            )
            for name in names
        }
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    with AdapterServer(config) as server:
        # Twice: a prefix that is cached for one is not used for another.
        for _ in range(2):
            assert {name: server.tokens(name) for name in names} == wanted
        listed = server.send("GET", "/v1/models")[2]["data"]
        assert server.send("GET", "/v1/models/")[2]["data"] == listed
        assert [(each["id"], each.get("parent")) for each in listed] == [
            ("base", None), ("poet", "base"), ("clerk", "base"),
        ]  # fmt: skip
        status, _, body = server.send("GET", "/v1/models/poet")
        assert (status, body["id"], body["parent"]) == (200, "poet", "base")
        status, _, body = server.send("GET", "/v1/models/nobody")
        assert status == 404
        assert "this server has base, poet, clerk" in body["error"]["message"]


def test_a_call_is_answered_by_the_adapter_that_it_named_or_not_at_all(
    config, monkeypatch
):
    with AdapterServer(config) as server:
        want = server.tokens("poet")
        assert want != server.tokens("base")
        engine = server.server.models.default.engine
        clerk = config.adapters["clerk"]
        encode_all, start = ServedModel.encode_all, ServedModel.start

        def encode_later(model, prompts):
            """The name becomes that of other weights while a prompt is encoded."""
            engine.unload_adapter("clerk")
            engine.unload_adapter("poet")
            engine.load_adapter("poet", clerk)
            return encode_all(model, prompts)

        with monkeypatch.context() as patch:
            patch.setattr(ServedModel, "encode_all", encode_later)
            assert server.tokens("poet") == want

        async def start_later(model, *arguments):
            engine.unload_adapter("poet")
            await start(model, *arguments)

        monkeypatch.setattr(ServedModel, "start", start_later)
        body = {"model": "poet", "prompt": PROMPT, "max_tokens": 8}
        status, _, answer = server.send("POST", "/v1/completions", body)
        assert status == 404, answer
        assert answer["error"]["code"] == "model_not_found"


def test_an_adapter_unloaded_while_its_model_loads_stays_unloaded(config):
    async def check():
        opened, go = threading.Event(), threading.Event()

        def open_engine(_):
            opened.set()
            assert go.wait(300)
            return InferenceEngine.from_pretrained(config=bare(config))

        source = ModelSource("base", open_engine, config.adapters)
        metrics = Metrics(vllm_names=False)
        models = Models([source], ServerConfig(port=0), metrics, max_batch=4)
        slot = models.default
        using = asyncio.create_task(use(slot))
        await asyncio.to_thread(opened.wait, 300)
        unloading = asyncio.create_task(models.unload_adapter("poet"))
        await asyncio.sleep(0)
        go.set()
        assert await using is slot.engine
        await unloading
        found = slot.adapters, slot.engine.adapters
        models.close()
        return found

    async def use(slot):
        async with slot.lease() as model:
            return model.engine

    assert asyncio.run(check()) == (("clerk",), ("clerk",))


def bare(config):
    """Return the settings of an engine with room for two adapters."""
    return replace(config, adapters=None, max_adapters=2)


@pytest.mark.parametrize("is_option", [True, False])
def test_a_model_that_is_loaded_again_does_without_an_adapter_that_is_gone(
    config, tmp_path, caplog, is_option
):
    """Its folder was deleted; the model and the other adapters are served."""
    folders = {
        name: shutil.copytree(folder, tmp_path / name)
        for name, folder in config.adapters.items()
    }

    async def check():
        source = ModelSource(
            "base",
            lambda _: InferenceEngine.from_pretrained(config=bare(config)),
            folders if is_option else {},
        )
        metrics = Metrics(vllm_names=False)
        models = Models([source], ServerConfig(port=0), metrics, max_batch=4)
        announced = []

        async def on_names():
            announced.append(slot.adapters)

        models.on_names = on_names
        slot = models.default
        if is_option:
            slot.load()
        else:
            for name, folder in folders.items():
                await models.load_adapter(None, name, str(folder))
        announced.clear()
        moved = folders["poet"].rename(tmp_path / "away")
        # As /sleep and /wake_up do it, and a time without requests.
        await slot.sleep()
        await slot.wake()
        assert slot.adapters == slot.engine.adapters == ("clerk",)
        assert announced == [("clerk",)]
        with pytest.raises(ApiError, match="found 'poet'"):
            models.find("poet")
        # Its name is free.
        moved.rename(folders["poet"])
        await models.load_adapter(None, "poet", str(folders["poet"]))
        assert set(slot.engine.adapters) == {"clerk", "poet"}
        assert models.find("poet") is slot
        models.close()

    asyncio.run(check())
    assert "adapter poet is unloaded" in caplog.text


def test_an_adapter_that_is_gone_at_the_start_is_an_error(config, tmp_path):
    gone = replace(config, adapters={"poet": tmp_path / "none"})
    with pytest.raises(ModelError, match="none"):
        make_server([("base", None)], ServerConfig(port=0), gone)


def test_an_adapter_that_an_engine_has_lost_can_be_loaded_again(config):
    """A worker was replaced while its folder was gone."""

    async def check():
        source = ModelSource(
            "base",
            lambda _: InferenceEngine.from_pretrained(config=bare(config)),
            config.adapters,
        )
        metrics = Metrics(vllm_names=False)
        models = Models([source], ServerConfig(port=0), metrics, max_batch=4)
        models.default.load()
        models.default.engine.unload_adapter("poet")
        await models.unload_adapter("poet")
        await models.load_adapter(None, "poet", str(config.adapters["poet"]))
        found = models.default.engine.adapters
        models.close()
        return found

    assert set(asyncio.run(check())) == {"clerk", "poet"}


def test_refusals(config):
    settings = ServerConfig(port=0)
    with pytest.raises(RequestError, match="beside 2 models"):
        make_server([("a", None), ("b", None)], settings, config)
    with pytest.raises(RequestError, match="found the names poet, poet, clerk"):
        make_server([("poet", None)], settings, config)
