"""An ASGI application on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.serve.settings import ServerConfig

BACKLOG = 2048


class HttpServer:
    """Serves an application until :meth:`stop`.

    config: TLS files, and the time that open requests have to finish.
    """

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
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
                timeout_keep_alive=75,
            )
        )

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
        await serving

    def stop(self, *, force: bool = False) -> None:
        """Accept nothing more and end once all open requests have finished.

        A second call, or ``force``, ends them.
        """
        if self._server.should_exit or force:
            self._server.force_exit = True
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_settings(config: ServerConfig) -> None:
    """Raise :class:`RequestError` for an address or a certificate of no use.

    Models load for minutes, so this is called before.
    """
    listen(config.host, config.port).close()
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
