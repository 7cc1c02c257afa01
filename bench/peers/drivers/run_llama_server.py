"""llama.cpp: its own server, started anew for each number of slots.

A slot's share of the context is fixed at the start, so one server for 1 and for 32
requests would hold memory that batch 1 does not need.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from socket import socket
from typing import Any

from harness import Answered, Facts, Loaded, ggml_instructions, main, tree_peak_bytes

WAIT_SECONDS = 120
SLOT_TOKENS = {1: 1024}
"""Context of a slot; with more than one slot it is 256: 128 in, 64 out, rounded up."""


class Server:
    """One running llama-server at a time."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._slots = self._port = self._peak = 0
        self.started = 0.0

    def with_slots(self, slots: int) -> None:
        """Be a server with so many slots, restarted if it is another."""
        if slots == self._slots:
            return
        self.stop()
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.started = time.time()
        self._process = subprocess.Popen(
            [str(part) for part in self._command(slots)],
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
        )
        self._slots = slots
        self._wait()

    def _command(self, slots: int) -> list[object]:
        threads = self._job["threads"]
        context = slots * SLOT_TOKENS.get(slots, 256)
        return [
            *[self._job["program"], "--model", self._job["model"], "--offline"],
            *["--host", "127.0.0.1", "--port", self._port, "--no-warmup"],
            *["--threads", threads, "--threads-batch", threads],
            *["--parallel", slots, "--ctx-size", context, "--no-kv-unified"],
            *["--cache-ram", 0, "--no-cache-prompt", "--log-verbosity", 1],
        ]

    def _wait(self) -> None:
        until = time.time() + WAIT_SECONDS
        while time.time() < until:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError("llama-server ended before it was ready")
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.005)
        raise RuntimeError(f"llama-server was not ready after {WAIT_SECONDS} s")

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request; gives the status and the JSON that came back."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request(method, path, json.dumps(body) if body else None)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Answer one prompt of token ids."""
        status, found = self.ask(
            "POST",
            "/completion",
            {
                "prompt": prompt,
                "n_predict": tokens,
                "temperature": 0,
                "samplers": ["temperature"],
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        if status != 200:
            raise RuntimeError(f"llama-server: {status}: {found}")
        return found

    def peak_bytes(self) -> int:
        """Most memory that any of the servers had."""
        if self._process is not None:
            now = tree_peak_bytes(self._process.pid) or 0
            self._peak = max(self._peak, now)
        return self._peak

    def stop(self) -> None:
        """End the server, if there is one."""
        if self._process is not None:
            self.peak_bytes()
            self._process.kill()
            self._process.wait()
            self._process = None


def load(job: dict[str, Any]) -> Loaded:
    server = Server(job)
    server.with_slots(1)

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        server.with_slots(len(prompts))
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda p: server.complete(p, tokens), prompts))
        # The server's own clock says how long it decoded: no stream to parse on a
        # core that it could use.
        decoding = found[0]["timings"]["predicted_ms"] / 1000
        first = time.perf_counter() - began - decoding
        return Answered([each["tokens"] for each in found], first)

    def facts() -> Facts:
        library = Path(job["program"]).with_name("libllama.so")
        known = "instructions: unknown"
        if library.exists():
            known = ggml_instructions(library)
        return Facts(
            {"llama-cpp-python": job["version"]},
            f"llama-server, {job['build']} build, {Path(job['model']).name}, KV "
            f"float16; {known}",
        )

    return Loaded(
        answer,
        facts,
        close=server.stop,
        own_memory=server.peak_bytes,
        started=lambda: server.started,
    )


if __name__ == "__main__":
    main(load)
