"""Fleets to test: engines on hashes and front-ends in processes, or one in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from http_clients import WAIT_SECONDS, HttpClient
from http_servers import HashServer
from inl.fleet import client, continuing, questions
from inl.fleet.engine_link import EngineLink
from inl.fleet.engine_port import EnginePort
from inl.fleet.server import FleetServer
from inl.serve.settings import ServerConfig
from waiting import until

FOLDER = Path(__file__).parent


WITH_CLOCK = """
import runpy, sys, time
now, ahead = time.time, float(sys.argv[1])
time.time = lambda: now() + ahead
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with a time of day that is ahead, for whatever it imports."""

TEXT = "/v1/completions"
LONG = {"prompt": list(range(100)), "seed": 3, "max_tokens": 200, "ignore_eos": True}
LONG |= {"return_token_ids": True}
SLOW = {"max_batch": 8, "seconds": 0.01}

SILENT: dict[str, bool] = {}
"""Addresses that a test lets answer nothing, and whether they answer again."""
TARGETS: dict[str, str] = {}
"""Addresses behind those of proxies."""


JUDGE = EngineLink._judge


def judge_patiently(link, problem):
    """Find an engine silent only if a test lets it be: others may be slow."""
    places = link.address, TARGETS.get(link.address, "")
    silent = [place for place in places if place in SILENT]
    if not silent:
        problem = link._problem = ""
    elif not problem:
        for place in silent:
            if SILENT[place]:  # it has answered again
                del SILENT[place]
    JUDGE(link, problem)


EngineLink._judge = judge_patiently
# An engine may start slowly.
client.START_SECONDS = questions.START_SECONDS = WAIT_SECONDS
continuing.CONTINUE_SECONDS = WAIT_SECONDS


class EngineProcess:
    """One engine; a context manager. Options are those of the script.

    clock: seconds that its time of day is ahead.
    """

    script = "hash_engine_process.py"

    def __init__(self, environment=(), *, clock=0, **options):
        paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [
                sys.executable,
                *(("-c", WITH_CLOCK, str(clock)) if clock else ()),
                str(FOLDER / self.script),
                json.dumps(options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                **dict(environment),
            },
        )
        self._address = ""

    @property
    def address(self):
        """``HOST:PORT``, once it listens."""
        if not self._address:
            self._address = self.process.stdout.readline().decode().strip()
            assert self._address, "the process has ended"
        return self._address

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def hold(self):
        """Let its steps wait after a few of them, until it is released."""
        address = self.address
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout.readline() == b"held\n", address

    def release(self):
        """Hold no step; also of a process that has ended."""
        self.process.send_signal(signal.SIGUSR2)

    def stop(self):
        """Let it answer nothing, as if its host had gone."""
        SILENT[self.address] = False
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)
        SILENT[self.address] = True

    def terminate(self):
        """Let it finish its requests and exit."""
        self.process.terminate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self.process.stdin.close()
        self.process.stdout.close()


class HeldEngine(HashServer):
    """One engine in a thread, whose steps a test can hold; a context manager."""

    def make(self):
        server = super().make()
        server.port = EnginePort(server, "127.0.0.1:0", None)
        return server

    @property
    def address(self):
        return self.url

    @property
    def gate(self):
        return self.engine.runner.gate


class FrontEndProcess(EngineProcess, HttpClient):
    """One front-end, whose address is that of HTTP; a context manager."""

    script = "front_end_process.py"

    @property
    def url(self):
        return f"http://{self.address}"


class Fleet(HttpClient):
    """A front-end in a thread; a context manager."""

    def __init__(self, addresses, *, secret=None, config=(), **options):
        self._arguments = list(addresses), {"secret": secret, **options}
        self._config = ServerConfig(port=0, keep_alive_seconds=3600, **dict(config))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.url = ""

    def _run(self):
        async def serve():
            self._loop = asyncio.get_running_loop()
            addresses, options = self._arguments
            self.server = FleetServer(addresses, self._config, **options)
            await self.server.serve(self._started)

        asyncio.run(serve())

    def _started(self, url):
        self.url = url
        self._ready.set()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(WAIT_SECONDS)
        return self

    def __exit__(self, *_):
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    @property
    def client(self):
        return self.server.client

    def add(self, address):
        """Use another engine, too."""
        self._loop.call_soon_threadsafe(self.server.membership.use, address)

    @property
    def parts(self):
        """Completions that engines compute."""
        return list(self.client.calls.parts.values())

    @property
    def counts(self):
        return self.client.counts

    def stream(self, path, body, *, headers=None):
        """Yield the lines of a stream as they arrive."""
        with self.connection() as connection:
            data = json.dumps({**body, "stream": True})
            connection.request("POST", path, data, headers or {})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.strip():
                    yield line.decode().rstrip()

    def engine_of(self, engines):
        """Return the engine of ``engines`` that has an open request."""
        loads = self.send("GET", "/load")[2]["replicas"]
        busy = {each["address"] for each in loads if each["open"]}
        (found,) = [each for each in engines if each.address in busy]
        return found

    def disturbed(self, engines, path, body, disturb, stream=None):
        """Return the lines of a stream that something happens to.

        That is after its first event, once each completion has tokens and the engine
        holds the next ones; then all of ``engines`` go on. stream: in place of that of
        the request.
        """
        for each in engines:
            each.hold()
        lines = []
        for line in self.stream(path, body) if stream is None else stream:
            lines.append(line)
            if len(lines) == 1:
                self.until_begun()
                disturb()
                for each in engines:
                    each.release()
        return lines

    def until_begun(self):
        """Wait until all completions of the open request have some tokens."""

        def have_begun():
            counts = [len(part.handle.token_ids) for part in self.parts]
            return min(counts, default=0) > 1

        until(have_begun)


def ids_of(lines):
    datas = [
        line.removeprefix("data: ") for line in lines if line.startswith("data: {")
    ]
    choices = [each for data in datas for each in json.loads(data)["choices"]]
    return [token for each in choices for token in each.get("token_ids") or ()]


def disturbed(fleet, engines, disturb, body=LONG):
    """Return the tokens of a stream that something happens to."""
    return ids_of(fleet.disturbed(engines, TEXT, body, disturb))


def answered(server, body=LONG):
    status, _, found = server.send("POST", TEXT, body)
    assert status == 200, found
    return found["choices"][0]["token_ids"]


class Proxy:
    """Passes TCP connections on until a partition; a context manager.

    During one, bytes are neither passed on nor refused.
    """

    def __init__(self, target):
        host, port = target.split(":")
        self._target = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        TARGETS[self.address] = target
        self._flows = threading.Event()
        self._flows.set()
        self._sockets = [self._listening]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # the engine is being started
                    near.close()
                    continue
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pump, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait(WAIT_SECONDS)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def partition(self):
        SILENT[self.address] = False
        self._flows.clear()

    def heal(self):
        self._flows.set()
        SILENT[self.address] = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._flows.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
