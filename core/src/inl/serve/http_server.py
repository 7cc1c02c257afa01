"""An ASGI application on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from inl.errors import RequestError
from inl.garbage_collection import only_young_collections
from inl.serve.api_error import ApiError
from inl.serve.app import error_shape
from inl.serve.connections import Connection, Connections
from inl.serve.http_messages import send_error

if TYPE_CHECKING:
    from inl.serve.event_stream import Receive, Send
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")

BACKLOG = 2048
"""Connections that wait to be accepted; all may be accepted at once."""

OTHER_FILES = 256
"""Open files that are no connections."""

MAX_CONNECTIONS = 10_000
"""Open connections of a process, by default."""

COLLECT_SECONDS = 5.0
"""Time between two looks whether to collect all garbage."""

YOUNG_COLLECTIONS = 10
"""Collections of young objects after which the old ones are collected too."""

FEW_CONNECTIONS = 100
"""Open connections beside which all garbage is collected, in some milliseconds."""

MOST_COLLECT_SECONDS = 600.0
"""Time after which it is collected, however many connections are open."""

MAX_OPEN_FILES = 65_536
"""What the limit of open files is raised to, if the system allows it."""

END_SECONDS = 2.0
"""Time of requests that are ended by the server to say so to their clients."""


class HttpServer:
    """Serves an application until :meth:`stop`.

    config: TLS files, the limits of connections, and the time that open requests have
    to finish.
    """

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._app = app
        self._connections = Connections(config, connection_limit(config))
        self._server = _Uvicorn(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                # Its keywords are those of uvicorn's own protocols.
                http=partial(Connection, self._connections),  # type: ignore[arg-type]
                ws="none",
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                backlog=BACKLOG,
                ssl_certfile=config.certificate,
                ssl_keyfile=config.private_key,
                timeout_graceful_shutdown=max(int(config.drain_seconds), 1),
                timeout_keep_alive=config.idle_seconds,  # type: ignore[arg-type]
            )
        )
        self._server.handshake_seconds = config.receive_seconds

    async def serve(
        self, listening: socket.socket, started: Callable[[], None]
    ) -> None:
        """Serve until :meth:`stop`, then finish the open requests.

        started: called once connections are accepted.
        """
        serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if self._server.started:
            started()
        if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            await serving  # each of its transports ends as garbage
            return
        with only_young_collections():
            collecting = asyncio.create_task(self._collect_garbage())
            try:
                await serving
            finally:
                collecting.cancel()

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        """Call the application; a request that the server ends leaves no error."""
        is_started = False

        async def send_on(message: Any) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            if not self._server.should_exit:
                raise
            if not is_started:
                error = ApiError(
                    503, "the server is stopping; try again", code="draining",
                    retry_after=1,
                )  # fmt: skip
                await send_error(send, error, error_shape(scope["path"], error))

    async def _collect_garbage(self) -> None:
        """Collect all garbage while few connections are open.

        A collection visits what the open ones have, for 10 to 80 us each. Requests
        leave no garbage but what references free, so it may wait.
        """
        waited = 0.0
        while True:
            await asyncio.sleep(COLLECT_SECONDS)
            waited += COLLECT_SECONDS
            is_due = gc.get_count()[2] > YOUNG_COLLECTIONS
            is_quiet = self._connections.count <= FEW_CONNECTIONS
            if is_due and (is_quiet or waited >= MOST_COLLECT_SECONDS):
                gc.collect()
                waited = 0.0

    def stop(self, *, force: bool = False) -> None:
        """Accept nothing more and end once all open requests have finished.

        A second call, or ``force``, ends them.
        """
        if self._server.should_exit or force:
            self._server.force_exit = True
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the caller, and limits the time of TLS handshakes."""

    handshake_seconds = 30.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        make: Any = config.http_protocol_class
        state = self.server_state
        protocol = partial(make, config=config, server_state=state, app_state={})
        seconds = None if config.ssl is None else self.handshake_seconds
        self.servers = [
            await loop.create_server(
                protocol, sock=each, ssl=config.ssl, backlog=BACKLOG,
                ssl_handshake_timeout=seconds,
            )
            for each in sockets or ()
        ]  # fmt: skip
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the open requests, and end those that take too long."""
        state, seconds = self.server_state, self.config.timeout_graceful_shutdown
        for each in [*self.servers, *(sockets or ())]:
            each.close()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.sleep(0.1)  # requests may have been sent meanwhile
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_tasks_to_complete()
        if tasks := list(state.tasks):
            log.warning(
                "%d requests are ended: the server stops%s", len(tasks),
                "" if self.force_exit else f", and has waited {seconds} s for them",
            )  # fmt: skip
        for connection in list(state.connections):
            if isinstance(connection, Connection):
                connection.end_answers()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_settings(config: ServerConfig) -> None:
    """Raise :class:`RequestError` for an address or a certificate of no use.

    Models load for minutes, so this is called before.
    """
    listen(config.host, config.port).close()
    most = open_files()
    if config.max_connections and most and config.max_connections > most:
        raise RequestError(
            f"max connections: found {config.max_connections}, this system allows "
            f"{most} open files (ulimit -n); accepts fewer"
        )
    if config.certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.certificate, config.private_key)
    except OSError as error:  # of which SSLError is one
        files = ", ".join(filter(None, (config.certificate, config.private_key)))
        raise RequestError(
            f"TLS certificate {files}: {error.strerror or error}; accepts files in the "
            "form PEM: a certificate, and its key in the same file or a second one"
        ) from error


def connection_limit(config: ServerConfig) -> int:
    """Return the greatest number of open connections of this process."""
    if config.max_connections is not None:
        return config.max_connections
    files = open_files()
    if files is None:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(files - BACKLOG - OTHER_FILES, files // 2))


def open_files() -> int | None:
    """Return the limit of open files of this process; ``None`` if it has none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Raise the limit of open files as far as a server can use it."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else MAX_OPEN_FILES
    wanted = min(most, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it stays what it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket; raises :class:`RequestError` if it cannot be.

    shared: whether further sockets of this user may listen on the same port; the
    system then divides new connections evenly between them.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(
            (str(address[0]), port), family=family, backlog=BACKLOG, reuse_port=shared
        )
    except OSError as error:
        reason = error.strerror or errno.errorcode.get(error.errno or 0, "")
        raise RequestError(
            f"{host}:{port}: {reason}; accepts another --host and --port"
        ) from error


def listen_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets that share one port; raises as :func:`listen`.

    The port is not shared with another server: it must be free before.
    """
    first = listen(host, port)
    port = first.getsockname()[1]
    first.close()
    return [listen(host, port, shared=True) for _ in range(count)]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes event loops: uvloop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.Loop
    return factory
