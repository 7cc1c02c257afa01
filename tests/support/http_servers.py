"""Servers in threads, on a runner that needs no model but the default tokenizer."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

from held_runner import HeldRunner, wait_submitted
from http_clients import HttpClient
from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model
from inl.protocol.runner import Limits
from inl.serve import model_slot
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig
from waiting import until

# A server freezes its objects when it has started, and those of the tests stay frozen:
# a model that is unloaded would collect the garbage of all of them.
model_slot.gc = SimpleNamespace(
    collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None
)

CONTEXT = 1024

READY = re.compile(r" at (http\S+),")
"""The line that ``inl serve`` logs once it accepts connections."""


class SlowRunner(HeldRunner):
    """Takes a time for each step."""

    seconds = 0.0

    def collect(self):
        time.sleep(self.seconds)
        return super().collect()


def hash_engine(max_batch, *, seconds=0.0, config=None, kind=SlowRunner, **options):
    """Return an engine on hashes, with the default model's tokenizer."""
    model = open_model(resolve_model(None))
    blocks = CONTEXT // 16
    limits = Limits(
        slots=max_batch + 1,
        blocks=(blocks * max_batch + 1,),
        block_size=16,
        max_blocks_per_seq=blocks,
        vocab=model.config.vocab_size,
        sampler="sample_filtered",
        token_budget=256,
    )
    runner = kind(limits)
    runner.seconds = seconds
    config = config or EngineConfig(max_batch=max_batch)
    return InferenceEngine(model, config=config, runner=runner, **options)


class HashServer(HttpClient):
    """A server in a thread; a context manager.

    loop_factory: makes its event loop; asyncio's own by default.
    """

    def __init__(self, *, max_batch=4, seconds=0.0, loop_factory=None, **settings):
        self._loop_factory = loop_factory
        self.config = ServerConfig(port=0, **settings)
        self.engine = self.tracing = None
        self._max_batch, self._seconds = max_batch, seconds
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        async def serve():
            self._loop = asyncio.get_running_loop()
            self.server = self.make()
            await self.server.serve(self._started)

        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                runner.run(serve())
        finally:
            self._ready.set()

    def make(self):
        """Return the server; called by its event loop."""
        sources = [ModelSource("hash", self._open)]
        return Server(
            sources, self.config, max_batch=self._max_batch, tracing=self.tracing
        )

    def _open(self, on_step):
        config = engine_config(EngineConfig(), self.config, self._max_batch)
        self.engine = hash_engine(
            self._max_batch,
            seconds=self._seconds,
            config=config,
            on_step=on_step,
        )
        return self.engine

    @property
    def admission(self):
        return self.server.models.default.admission

    def _started(self, url):
        self.url = url
        self._ready.set()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(300)
        assert self.url, "the server ended before it was ready"
        return self

    def stop(self):
        # A server that was stopped before may have ended, and its loop with it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.server.stop)

    def __exit__(self, *_):
        self.stop()
        self._thread.join(300)
        assert not self._thread.is_alive()
        self.server.close()

    @property
    def used_blocks(self):
        """Blocks of open requests; none while the model is unloaded.

        An engine that is closed with a step in flight never collects that step.
        """
        engine = self.server.models.default.engine
        if engine is None:
            return 0
        return sum(p.used_blocks for p in engine.core.scheduler.kv_cache.pools)

    def wait_idle(self):
        """Wait until nothing is open; fails if something stays.

        What the server records of a request may still be missing.
        """
        until(lambda: not (self.admission.open or self.used_blocks))
        assert self.admission.queued_tokens == 0

    @contextmanager
    def paused(self):
        """No step ends meanwhile, so that requests stay open; yields the gate."""
        gate = self.engine.runner.gate
        gate.hold_after(0)
        try:
            yield gate
        finally:
            gate.release()

    def wait_submitted(self, count):
        """Wait until the engine has so many calls, all of which are open.

        A call is counted by the admission before the engine has it.
        """
        wait_submitted(self.engine, count)

    @contextmanager
    def busy(self, headers=None):
        """A request is open meanwhile, whose client leaves at the end; no step ends."""
        with self.paused():
            with self.connection() as connection:
                body = b'{"prompt": [1], "max_tokens": 1000, "ignore_eos": true}'
                connection.request("POST", "/v1/completions", body, headers or {})
                self.wait_submitted(1)
                yield
            until(lambda: not self.admission.open)
        self.wait_idle()

    def begin(self, *request):
        """Send a request in a thread; its future has what :meth:`send` returns."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self.send, *request)
        pool.shutdown(wait=False)
        return future


class ServerProcess:
    """An ``inl serve`` process with the default model; a context manager.

    Its exit code must be 0 after SIGTERM. bare: without any options but these.
    """

    def __init__(self, *options, bare=False):
        self._command = [sys.executable, "-m", "inl", "serve", *options]
        if not bare:
            self._command += ["--port", "0", "--device", "cpu", "--max-batch", "4"]
            self._command += ["--context", "2048", "--name", "default"]
        self.url = ""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        with self._log.open("w") as output:
            self.process = subprocess.Popen(self._command, stderr=output)
        while not (found := READY.search(self.log)):
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        self.url = found[1]
        return self

    @property
    def log(self):
        return self._log.read_text()

    def __exit__(self, *_):
        self.process.terminate()
        try:
            assert self.process.wait(300) == 0, self.log
        finally:
            self.process.kill()
            self.process.wait()
            self._folder.cleanup()
