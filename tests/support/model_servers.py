"""Servers of several models, which count the engines that they open."""

from __future__ import annotations

import gc
import threading
import weakref

from held_runner import StepGate
from http_servers import HashServer, hash_engine
from inl.config import EngineConfig
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig


class Source:
    """Counts the engines that were opened and closed."""

    def __init__(self, name, *, seconds=0.0):
        self.name, self.seconds = name, seconds
        self.engines, self.opening = [], threading.Event()
        self.may_open = threading.Event()
        self.may_open.set()
        self.error = None
        self.gate = StepGate()
        """Holds the steps of all engines."""

    def open(self, on_step):
        self.opening.set()
        assert self.may_open.wait(300)
        if self.error is not None:
            raise self.error
        settings = engine_config(EngineConfig(), ServerConfig(), 2)
        engine = hash_engine(2, seconds=self.seconds, config=settings, on_step=on_step)
        engine.runner.gate = self.gate
        self.engines.append(weakref.ref(engine))
        return engine

    @property
    def loaded(self):
        gc.collect()
        return [each() for each in self.engines if each() is not None]


class ModelServer(HashServer):
    """A server of several models."""

    def __init__(self, *sources, **settings):
        super().__init__(**settings)
        self.sources = sources

    def make(self):
        sources = [ModelSource(each.name, each.open) for each in self.sources]
        return Server(sources, self.config, max_batch=2)

    def complete(self, model, **options):
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, **options}
        return self.send(
            "POST", "/v1/completions", {"return_token_ids": True, "seed": 1, **body}
        )

    def is_loaded(self):
        data = self.send("GET", "/v1/models")[2]["data"]
        return {each["id"]: each["is_loaded"] for each in data}
