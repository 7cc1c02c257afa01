"""The worker's side: serves one runner to the process that started this one.

``python -m inl.workers.worker_main --fd N`` speaks :mod:`inl.protocol.wire` on the inherited
socket N. ``--factory module:function`` serves any runner: the function is called with
the JSON object that the parent sends and a progress callback, and returns a
:class:`Served`. Without it, a model is opened on a device of this interpreter.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from inl.errors import InlError, OutOfMemory, ProtocolError, RunnerError
from inl.protocol import wire_values
from inl.protocol.wire import Channel, Frame, Kind
from inl.spec.message import STEP, header
from inl.weights.progress import LoadStage

if TYPE_CHECKING:
    from inl.protocol.runner import Runner
    from inl.spec.message import IntArray
    from inl.weights.progress import Progress
    from inl.workers.startup import StartedRunner

    Factory = Callable[[Mapping[str, Any], Progress], StartedRunner]

DEFAULT = "inl.workers.startup:serve_model"
GRACE_SECONDS = 2.0
"""How long a step may still take once the parent is gone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the parent closes the connection; returns the exit status."""
    parser = argparse.ArgumentParser("inl.workers.worker_main", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    parser.add_argument("--factory", default=DEFAULT, help="module:function")
    found = parser.parse_args(arguments)
    # Ctrl-C is the parent's business: it reaches every process of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(found.fd, False)
    channel = Channel(socket.socket(fileno=found.fd))
    threading.Thread(target=_watch, args=(found.fd,), daemon=True).start()
    try:
        _serve(channel, found.factory)
    except EOFError:
        return 0
    return 0


def _watch(descriptor: int) -> None:
    """End this process, however busy, soon after the parent is gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _serve(channel: Channel, factory: str) -> None:
    channel.send(Kind.HELLO, wire_values.text(wire_values.hello()))
    try:
        frame = _receive(channel)
        if frame.kind is not Kind.OPEN:
            raise ProtocolError(f"worker: found {frame.kind.name} before OPEN")
        served = _make(channel, factory, wire_values.read_text(frame.payload, "OPEN"))
        # A search for cycles among all that was loaded stops steps for 80 ms.
        gc.collect()
        gc.freeze()
        try:
            channel.send(Kind.READY, wire_values.ready(served.ready))
            _work(channel, served.runner)
        finally:
            served.runner.close()
    # A factory and a runner are anyone's code: what they raise is told to the parent.
    except (EOFError, SystemExit):
        raise
    except Exception as error:
        if not isinstance(error, InlError):
            traceback.print_exc()
        channel.send(Kind.ERROR, wire_values.failure(error))
        while _receive(channel).kind is not Kind.CLOSE:
            """What was sent before the parent knew is of no use."""


def _make(channel: Channel, name: str, options: Mapping[str, Any]) -> StartedRunner:
    module, _, attribute = name.partition(":")
    factory: Factory | None = vars(import_module(module)).get(attribute)
    if factory is None:
        raise RunnerError(f"worker: {name}: no such function; accepts module:function")

    def progress(
        done: int, total: int, stage: LoadStage = LoadStage.LOADING, /
    ) -> None:
        channel.send(Kind.PROGRESS, wire_values.progress(done, total, stage))

    return factory(options, progress)


def _work(channel: Channel, runner: Runner) -> None:
    flying: deque[bytes | None] = deque()
    while True:
        kind, payload = _receive(channel)
        if kind is Kind.MESSAGE:
            message = wire_values.ints(payload, "message")
            full = _submit(runner, message)
            if header(message).kind == STEP:
                flying.append(full)
        elif kind is Kind.COLLECT:
            full = flying.popleft() if flying else None
            if full is None:
                channel.send(Kind.REPLY, wire_values.reply(runner.collect()))
            else:
                channel.send(Kind.FULL, full)
        elif kind is Kind.MASKS:
            if not (flying and flying[-1]):
                runner.sample(*wire_values.read_masks(payload))
        elif kind is Kind.CLOSE:
            return
        else:
            raise ProtocolError(f"worker: found {kind.name} among steps")


def _submit(runner: Runner, message: IntArray) -> bytes | None:
    """Submit a frame; what to tell the parent of a step that has no memory."""
    try:
        runner.submit(message)
    except OutOfMemory as error:
        if header(message).kind != STEP:
            raise
        # Its words alone: the error holds the frames of what failed.
        return wire_values.failure(error)
    return None


def _receive(channel: Channel) -> Frame:
    frame = channel.receive()
    assert frame is not None, "without a time limit there is always a frame"
    return frame


if __name__ == "__main__":
    sys.exit(main())
