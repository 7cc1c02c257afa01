"""Main program of a worker process: serves one runner to its parent process.

``python -m inl.runners.worker_main --fd N`` uses :mod:`inl.protocol.wire` on the
inherited socket N, ``--port N`` on a connection to the parent's port N, see
:mod:`inl.workers.connection`, ``--connect`` on one to the engine that the variable
INL_WORKER_ADDRESS names, see :mod:`inl.workers.handshake`. ``--factory
module:function`` selects the runner: the function is called with the JSON object that
the parent sends and a progress callback, and returns a
:class:`~inl.runners.startup.StartedRunner`. The default factory opens a model on a
device of this interpreter.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
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
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from inl.backend.rank_sockets import reserve_address
from inl.errors import InlError, ModelError, OutOfMemory, ProtocolError, RunnerError
from inl.progress import LoadStage
from inl.protocol import wire_arrays, wire_json
from inl.protocol.wire import Channel, Frame, Kind
from inl.runners.place_check import inspect
from inl.spec.message import STEP, header
from inl.workers.connection import connect_to_parent
from inl.workers.handshake import ANY_SEAT, join
from inl.workers.heartbeat_process import start_heartbeat
from inl.workers.launchers import device_here
from inl.workers.settings import ADDRESS, DEVICE, SEAT, SECRET, SECRET_FILE, read_secret

if TYPE_CHECKING:
    from inl.progress import Progress
    from inl.protocol.runner import Runner
    from inl.runners.startup import StartedRunner
    from inl.spec.message import IntArray

    Factory = Callable[[Mapping[str, Any], Progress], StartedRunner]

log = logging.getLogger("inl")

DEFAULT = "inl.runners.startup:serve_model"
JOIN_SECONDS = 60.0
"""Time for an engine to listen, which may be started after its workers."""
GRACE_SECONDS = 2.0
"""Time to finish a step once the parent has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the parent closes the connection; returns the exit status."""
    parser = argparse.ArgumentParser("inl.runners.worker_main", description=__doc__)
    parent = parser.add_mutually_exclusive_group(required=True)
    parent.add_argument("--fd", type=int, help="inherited socket")
    parent.add_argument("--port", type=int, help="port of the parent")
    parent.add_argument("--connect", action="store_true", help="to INL_WORKER_ADDRESS")
    parser.add_argument("--factory", default=DEFAULT, help="module:function")
    options = parser.parse_args(arguments)
    _log_to_parent()
    if options.connect:
        return _serve_from_environment(options.factory)
    # Ctrl-C reaches every process of the terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.fd is None:
        channel = Channel(connect_to_parent(options.port))
        ended: Callable[[], object] = partial(sys.stdin.buffer.read, 1)
    else:
        os.set_inheritable(options.fd, False)
        channel = Channel(socket.socket(fileno=options.fd))
        ended = partial(_wait_for_hangup, options.fd)
    threading.Thread(target=_exit_with_parent, args=(ended,), daemon=True).start()
    with suppress(EOFError):
        _serve(channel, options.factory)
    return 0


def _serve_from_environment(factory: str) -> int:
    """Serve the engine of the environment variables that a place has set."""
    settings = dict(os.environ)
    for name in (SECRET, SECRET_FILE):  # not for processes that libraries start
        os.environ.pop(name, None)
    try:
        secret = read_secret(settings)
        if secret is None or ADDRESS not in settings:
            raise RunnerError(
                f"worker: {ADDRESS} or {SECRET} is not set; a place sets both, and "
                "`inl worker` starts a worker by hand"
            )
        seat = settings.get(SEAT, str(ANY_SEAT))
        if not seat.isdecimal():
            raise RunnerError(f"{SEAT}: found {seat!r:.40}, accepted: a whole number")
        device = settings.get(DEVICE)
        serve_engine(
            settings[ADDRESS], secret, int(seat), device=device, factory=factory
        )
    except InlError as error:
        log.error("%s: %s", type(error).__name__, error)
        return 2
    return 0


def serve_engine(
    address: str,
    secret: bytes,
    seat: int = ANY_SEAT,
    *,
    seconds: float = JOIN_SECONDS,
    device: str | None = None,
    local: int | None = None,
    factory: str = DEFAULT,
) -> None:
    """Join the engine at ``HOST:PORT`` and serve it until it closes the connection.

    seconds: time for the engine to listen. device: serves instead of the one that the
    engine asks for. local: number of the worker on its host, which says which of its
    devices serves. Ends the process if the engine is lost. Raises
    :class:`~inl.errors.DeviceError` and :class:`~inl.errors.ProtocolError` if it cannot
    be joined.
    """
    joined = join(address, secret, seat, seconds)
    log.info("worker %d of %s", joined.seat, address)
    heartbeat = start_heartbeat(
        joined.heartbeat, lambda why: log.info("the engine %s", why)
    )
    threading.Thread(
        target=_exit_with_parent, args=(heartbeat.wait,), daemon=True
    ).start()
    channel = Channel(joined.frames)
    # Other ranks reach this host where the engine does.
    offer, reserved = reserve_address(joined.frames.getsockname()[0])

    def named(asked: str) -> str:
        if device is not None:
            return device
        return asked if local is None else device_here(asked, local)

    try:
        with suppress(EOFError), reserved:
            _serve(channel, factory, named, {"rank_address": offer})
    finally:
        channel.close()
        heartbeat.close()


def _log_to_parent() -> None:
    """Write messages from INFO on to standard error, which the parent logs."""
    log = logging.getLogger("inl")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _wait_for_hangup(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()


def _exit_with_parent(ended: Callable[[], object]) -> None:
    """End this process, even during a step, soon after the parent has ended.

    ended: returns then.
    """
    ended()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _serve(
    channel: Channel,
    factory: str,
    named: Callable[[str], str] = str,
    offers: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Serve a runner.

    named: the device that serves instead of the one that the parent names. offers:
    further fields of HELLO.
    """
    channel.send(Kind.HELLO, wire_json.text({**wire_json.hello(), **offers}))
    try:
        while (frame := _receive(channel)).kind is Kind.CHECK:
            asked = _renamed(wire_json.read_text(frame.payload, "CHECK"), named)
            channel.send(Kind.CHECK, wire_json.text(inspect(asked)))
        if frame.kind is Kind.CLOSE:
            return
        if frame.kind is not Kind.OPEN:
            raise ProtocolError(f"worker: found {frame.kind.name}, expected OPEN")
        options = _renamed(wire_json.read_text(frame.payload, "OPEN"), named)
        started = _start(channel, factory, options)
        # A full garbage collection over the loaded objects delays steps by 80 ms.
        gc.collect()
        gc.freeze()
        try:
            channel.send(Kind.READY, wire_json.ready(started.ready))
            while not _work(channel, started.runner):
                if not _reset(channel, started.runner):
                    return
        finally:
            started.runner.close()
    # Factories and runners may be third-party code: send any exception to the parent.
    except (EOFError, SystemExit):
        raise
    except Exception as error:
        _report(channel, error)
        while _receive(channel).kind is not Kind.CLOSE:
            """Discard frames that were sent before the parent received the error."""


def _renamed(options: dict[str, Any], named: Callable[[str], str]) -> dict[str, Any]:
    """Return what the parent has sent with the name of this worker's device."""
    if isinstance(options.get("exchange"), dict):
        options["exchange"] = _renamed(options["exchange"], named)
    if isinstance(options.get("device"), str):
        options["device"] = named(options["device"])
    return options


def _report(channel: Channel, error: Exception) -> None:
    if not isinstance(error, InlError):
        traceback.print_exc()
    channel.send(Kind.ERROR, wire_json.failure(error))


def _start(channel: Channel, name: str, options: Mapping[str, Any]) -> StartedRunner:
    module, _, attribute = name.partition(":")
    factory: Factory | None = vars(import_module(module)).get(attribute)
    if factory is None:
        raise RunnerError(f"worker: {name}: no such function; accepts module:function")

    def progress(
        done: int, total: int, stage: LoadStage = LoadStage.LOADING, /
    ) -> None:
        channel.send(Kind.PROGRESS, wire_arrays.progress(done, total, stage))

    return factory(options, progress)


def _reset(channel: Channel, runner: Runner) -> bool:
    """Discard what was sent before the parent received an error, and reset.

    Returns ``False`` at CLOSE. A runner that cannot be reset ends the process, so that
    the parent may replace it.
    """
    while (frame := _receive(channel)).kind is not Kind.RESET:
        if frame.kind is Kind.CLOSE:
            return False
    try:
        runner.reset()
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(1) from error
    channel.send(Kind.RESET, bytes(frame.payload))
    return True


def _work(channel: Channel, runner: Runner) -> bool:
    """Serve steps until CLOSE; returns ``False`` after an error of the runner."""
    try:
        _serve_steps(channel, runner)
    except (EOFError, SystemExit):
        raise
    except Exception as error:
        _report(channel, error)
        return False
    return True


def _serve_steps(channel: Channel, runner: Runner) -> None:
    """Serve steps until CLOSE; raises the errors of the runner."""
    failures: deque[bytes | None] = deque()
    """For each step in flight ``None``, or the FULL payload if it was not begun."""
    while True:
        kind, payload = _receive(channel)
        if kind is Kind.MESSAGE:
            message = wire_arrays.ints(payload, "message")
            failure = _submit(runner, message)
            if header(message).kind == STEP:
                failures.append(failure)
        elif kind is Kind.COLLECT:
            failure = failures.popleft() if failures else None
            if failure is None:
                channel.send(Kind.REPLY, wire_arrays.reply(runner.collect()))
            else:
                channel.send(Kind.FULL, failure)
        elif kind is Kind.MASKS:
            if not (failures and failures[-1]):
                runner.sample(*wire_arrays.read_masks(payload))
        elif kind is Kind.RESET:
            runner.reset()
            failures.clear()
            channel.send(Kind.RESET, bytes(payload))
        elif kind is Kind.READ:
            channel.send(Kind.READ, wire_arrays.contents(runner.read()))
        elif kind is Kind.WRITE:
            runner.write(*wire_arrays.read_write(payload))
        elif kind is Kind.ADAPTER:
            channel.send(Kind.ADAPTER, _load_adapter(runner, payload))
        elif kind is Kind.ENCODE:
            channel.send(*_encode(runner, payload))
        elif kind is Kind.CLOSE:
            return
        else:
            raise ProtocolError(
                f"worker: found {kind.name}, accepts MESSAGE, MASKS, COLLECT, RESET, "
                "READ, WRITE, ADAPTER, ENCODE and CLOSE"
            )


def _load_adapter(runner: Runner, payload: bytearray) -> bytes:
    """Load an adapter; returns the payload of the answer."""
    source = wire_json.read_adapter_source(payload, "ADAPTER")
    try:
        runner.load_adapter(source)
    except (ModelError, OutOfMemory) as error:
        return wire_json.failure(error)
    return wire_json.text({})


def _encode(runner: Runner, payload: bytearray) -> tuple[Kind, bytes]:
    """Encode sequences; returns the kind and the payload of the answer."""
    try:
        rows = runner.encode(wire_arrays.read_sequences(payload))
    except InlError as error:  # of this call only: no state outlives it
        return Kind.FULL, wire_json.failure(error)
    return Kind.ENCODE, wire_arrays.results(rows)


def _submit(runner: Runner, message: IntArray) -> bytes | None:
    """Submit a frame; returns the FULL payload of a step that was out of memory."""
    try:
        runner.submit(message)
    except OutOfMemory as error:
        if header(message).kind != STEP:
            raise
        # Encoded now, since the traceback of the error references large tensors.
        return wire_json.failure(error)
    return None


def _receive(channel: Channel) -> Frame:
    frame = channel.receive()
    assert frame is not None, "without a time limit there is always a frame"
    return frame


def end_process(status: int) -> NoReturn:
    """End this process without the interpreter's own end.

    Threads of libraries that find a peer gone abort the process while it ends.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    end_process(main())
