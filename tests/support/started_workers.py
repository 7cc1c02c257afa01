"""A place that starts child processes, and raw connections to an engine's port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from inl.workers import handshake
from inl.workers.settings import parse_address

HEAD = handshake.HEAD.pack(handshake.MAGIC, handshake.VERSION)


class Child:
    """A worker that was started by a place."""

    def __init__(self, arguments, environment, python=(sys.executable,)):
        self.log = Path(tempfile.mkstemp(prefix="worker-")[1])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*python, *arguments],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.name = f"child-{self.process.pid}"
        self.stops = []

    @property
    def alive(self):
        return self.process.poll() is None

    @property
    def log_tail(self):
        return self.log.read_text() if self.log.exists() else ""

    def stop(self, seconds):
        self.stops.append(seconds)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.unlink(missing_ok=True)


def raw(address, head=None):
    """Connect to an engine; returns the socket and the greeting."""
    sock = socket.create_connection(parse_address(address), 30)
    sock.sendall(HEAD if head is None else head)
    return sock, b"" if head is not None else receive(sock, handshake.GREETING.size)


def receive(sock, count):
    """Return bytes up to ``count``, or to the end."""
    data = b""
    while len(data) < count and (part := sock.recv(count - len(data))):
        data += part
    return data


def refusal(sock):
    """Return the reason in an answer; fails for one that accepts."""
    data = receive(sock, 10_000)
    accepted, _, proof, length = handshake.ANSWER.unpack_from(data)
    assert (accepted, proof) == (0, bytes(32))
    assert len(data) == handshake.ANSWER.size + length
    return data[handshake.ANSWER.size :].decode()


def knock(greeted, secret, *, role=0, seat=0, worker=bytes(16)):
    """Return what a worker answers to a greeting."""
    said = handshake.KNOCK.pack(role, seat, 77, worker, bytes(32))
    return said + handshake.mac(secret, b"worker", HEAD + greeted + said)
