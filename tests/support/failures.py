"""Kinds of failure of a server, each of which a test begins and ends."""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager

from http_servers import HashServer, SlowRunner, hash_engine
from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.step_loop import AsyncStepLoop
from inl.errors import NonFiniteLogits, OutOfMemory, ProtocolError, WorkerLost
from inl.scheduling.scheduler import Scheduler
from inl.serve.server import engine_config
from inl.text.template import ChatTemplate
from inl.text.tokenizer import Tokenizer

NO_PROCESSES = OSError(errno.EAGAIN, "Resource temporarily unavailable")
"""What a system says that starts no more processes or threads."""


class FaultyRunner(SlowRunner):
    """Raises the errors of its class's ``faults`` in calls of these methods."""

    faults: dict[str, BaseException]

    def _fail(self, method):
        error = self.faults.get(method)
        if isinstance(error, list):
            error = error.pop() if error else None
        if error is not None:
            raise error

    def submit(self, message):
        self._fail("submit")
        super().submit(message)

    def collect(self):
        self._fail("collect")
        return super().collect()

    def reset(self):
        self._fail("reset")
        super().reset()


class FaultyServer(HashServer):
    """A server of hashes whose runner and parts fail on request.

    faults: method of the runner -> error, or errors of the next calls. opening:
    called when the model is loaded.
    """

    def __init__(self, trace=None, **settings):
        super().__init__(**settings)
        self.faults = {}
        self.opening = lambda: None
        self.loads = 0
        self.asked = []
        """Futures of requests that a test has sent."""
        self._trace = trace
        self.kind = type("Runner", (FaultyRunner,), {"faults": self.faults})

    def _open(self, on_step):
        self.loads += 1
        self.opening()
        config = EngineConfig(trace=self._trace)
        self.engine = hash_engine(
            self._max_batch,
            config=engine_config(config, self.config, self._max_batch),
            kind=self.kind,
            on_step=on_step,
        )
        return self.engine


def raises(error, first=None):
    """Return a function that raises an error, in its first calls or in all."""
    calls = [0]

    def call(*_, **__):
        calls[0] += 1
        if first is None or calls[0] <= first:
            raise error

    return call


@contextmanager
def runner_faults(server, **faults):
    """The runner's methods raise an error, or some errors once each, meanwhile."""
    server.faults.update(faults)
    try:
        yield
    finally:
        server.faults.clear()


@contextmanager
def held(server):
    """No step ends meanwhile."""
    with server.paused():
        yield


@contextmanager
def held_lock(server):
    """A thread holds the lock of the engine meanwhile, as a slow admin call does."""
    begun, end = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert end.wait(300)

    lock = server.engine._dispatcher.lock
    thread = threading.Thread(target=lock.run, args=(hold,))
    thread.start()
    assert begun.wait(300)
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def lost_while_loading(server, load):
    """The engine is lost, and loading it again does something."""
    server.opening = load
    try:
        with runner_faults(server, collect=[WorkerLost("killed")]):
            yield
    finally:
        server.opening = lambda: None


@contextmanager
def hanging_load(server):
    end = threading.Event()
    try:
        with lost_while_loading(server, lambda: end.wait(300)):
            yield
    finally:
        end.set()


@contextmanager
def patched(owner, name, call, first=None):
    """A method calls ``call`` first, meanwhile or the first times."""
    before, calls = getattr(owner, name), [0]

    def changed(*arguments, **options):
        calls[0] += 1
        if first is None or calls[0] <= first:
            call()
        return before(*arguments, **options)

    setattr(owner, name, changed)
    try:
        yield
    finally:
        setattr(owner, name, before)


def steps(**faults):
    return lambda server: runner_faults(server, **faults)


def parts(owner, name, error, first=None):
    return lambda server: patched(owner, name, raises(error), first)


def metrics(error, first=None):
    return lambda server: patched(server.engine.core, "_on_step", raises(error), first)


KINDS = {
    "a step fails once": steps(collect=[OSError("the cable is out")]),
    "a frame fails once": steps(submit=[OSError("the cable is out")]),
    "a step fails three times": steps(collect=[OSError("bad cable")] * 3),
    "a step fails always": steps(collect=OSError("the cable is out")),
    "a frame fails always": steps(submit=OSError("the cable is out")),
    "no memory of Python once": steps(collect=[MemoryError()]),
    "no memory of Python always": steps(submit=MemoryError()),
    "no memory of the device once": steps(submit=[OutOfMemory("full")]),
    "no memory of the device always": steps(submit=OutOfMemory("full")),
    "a wrong reply once": steps(collect=[ProtocolError("a word too many")]),
    "a step exits": steps(collect=[SystemExit(3)]),
    "a worker is lost": steps(collect=[WorkerLost("killed")]),
    "workers are lost always": steps(collect=WorkerLost("killed")),
    "a runner cannot be reset": steps(
        collect=[OSError("the cable is out")], reset=OSError("no reset")
    ),
    "a lost engine does not load": lambda server: lost_while_loading(
        server, raises(OSError("no such disk"))
    ),
    "a lost engine loads the second time": lambda server: lost_while_loading(
        server, raises(OSError("no such disk"), first=1)
    ),
    "a lost engine loads for ever": hanging_load,
    "a step hangs": held,
    "the lock is held": held_lock,
    "the scheduler fails once": parts(Scheduler, "plan", ZeroDivisionError(), 1),
    "the scheduler fails always": parts(Scheduler, "plan", ZeroDivisionError()),
    "the thread fails once": parts(AsyncStepLoop, "_round", KeyError("batch"), 1),
    "no thread starts": parts(AsyncStepLoop, "_start_thread", RuntimeError("no")),
    "metrics fail once": metrics(KeyError("x"), 1),
    "metrics fail always": metrics(KeyError("x")),
    "logits are not finite once": parts(
        EngineCore, "step", NonFiniteLogits("row 0: NaN"), 1
    ),
    "the tokenizer fails once": parts(Tokenizer, "encode", OSError("no tables"), 1),
    "the tokenizer fails always": parts(Tokenizer, "encode", OSError("no tables")),
    "the template's process does not start once": parts(
        ChatTemplate, "_render", NO_PROCESSES, 1
    ),
    "the template's process does not start": parts(
        ChatTemplate, "_render", NO_PROCESSES
    ),
}
"""Name -> context manager of a server, in whose body something fails."""
