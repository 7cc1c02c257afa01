"""Access control before all endpoints: keys, hosts, origins and body sizes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import re
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from inl.serve.api_error import ApiError
from inl.serve.event_stream import Receive, Send
from inl.serve.http_messages import read_body, send_error
from inl.serve.request_log import Record
from inl.serve.settings import BYTES_PER_SECOND, LOOPBACK
from inl.serve.web_page import FILES as PAGE_FILES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing

    App = Callable[[Any, Receive, Send], Awaitable[None]]

LENGTH = re.compile(r"[0-9]{1,20}")

OPEN_PATHS = {"/health", "/ready", *PAGE_FILES}
"""Paths that need no key."""

ADMIN_PATHS = {
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
"""Paths that need an admin key, as vLLM names them."""

FLEET_PATHS = {
    "/fleet",
    "/fleet/add",
    "/fleet/drain",
    "/fleet/remove",
    "/fleet/restart",
}
"""Paths of a server of several engines that need an admin key."""

STORE_PATHS = {"/api/pull", "/api/delete"}
"""Paths that need an admin key, as Ollama names them; they change files."""

KEYED_PATHS = ADMIN_PATHS | STORE_PATHS | FLEET_PATHS

ANONYMOUS = "anonymous"

CORS = {
    "access-control-allow-methods": "GET, HEAD, POST, DELETE, OPTIONS",
    "access-control-allow-headers": "*, authorization",
    "access-control-max-age": "600",
}


OPEN_BYTES = 256 << 20
"""Bytes that the bodies of open requests may take together, or one body if more."""


class Gate:
    """ASGI middleware: checks each request, numbers and logs it.

    error_body: returns the body of an error for a path. check_room: raises an error for
    a path and a client if the request would not be admitted, whatever its body says.
    tracing: exports a span for each request that generates. body_paths: of requests
    whose body is read before they are passed on, once there is room: while they wait
    for a client, they take a third of what they would behind the application's layers.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        error_body: Callable[[str, ApiError], dict[str, Any]],
        check_room: Callable[[str, str], Awaitable[None]],
        tracing: Tracing | None = None,
        body_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._config = config
        self._error_body = error_body
        self._check_room = check_room
        self._tracing = tracing
        self._body_paths = frozenset(body_paths)
        self._keys = [key.encode() for key in config.api_keys]
        self._admin_keys = [key.encode() for key in config.admin_keys]
        self._owners = {
            f"key {at}": hashlib.sha256(key).digest()
            for at, key in enumerate(self._keys)
        }
        """Digests of keys, which other front-ends may have in another order."""
        self._numbers = itertools.count()
        self._held = 0
        """Bytes of the bodies of all open requests."""
        self._run = secrets.token_hex(6)
        hosts = set(config.allowed_hosts)
        if hosts or config.is_loopback:
            hosts |= {*LOOPBACK, config.host}
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass an accepted request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = f"{self._run}{next(self._numbers):08x}"
        record = Record(number, scope["method"], scope["path"])
        headers = {
            k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]
        }
        extra = self._cors_headers(headers)
        extra.append((b"x-request-id", number.encode()))

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        receive_on = self._limited(receive, record)
        try:
            scope.setdefault("state", {})
            client = self._check(scope, headers)
            owner = self._owners.get(client, b"")
            scope["state"] |= {"record": record, "client": client, "owner": owner}
            await self._pass_on(scope, receive_on, send_on)
        except ApiError as error:
            await send_error(send_on, error, self._error_body(scope["path"], error))
        finally:
            self._held -= record.body_bytes
            record.finish()
            record.write()
            if self._tracing is not None and record.model is not None:
                self._tracing.record(record, headers)

    async def _pass_on(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["method"] == "POST":
            await self._check_room(scope["path"], scope["state"]["client"])
            if scope["path"] in self._body_paths:
                receive = _received(await read_body(receive), receive)
        await self._app(scope, receive, send)

    def _check(self, scope: Any, headers: Mapping[str, str]) -> str:
        """Return the name of the client; raises :class:`ApiError`."""
        self._check_host(headers)
        self._check_origin(headers)
        length = headers.get("content-length", "0")
        if not LENGTH.fullmatch(length):
            raise ApiError(400, f"content-length: found {length!r:.40}, accepts digits")
        if int(length) > self._config.max_body_bytes:
            raise self._too_large(length)
        path = scope["path"]
        if path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return ANONYMOUS
        if path in KEYED_PATHS and self._admin_keys:
            return self._client(headers, self._admin_keys, "admin key")
        return self._client(headers, self._keys, "api key")

    def _client(self, headers: Mapping[str, str], keys: list[bytes], kind: str) -> str:
        if not keys:
            return ANONYMOUS
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = None
        # All are compared, so that the time does not depend on the key.
        for position, key in enumerate(keys):
            if hmac.compare_digest(key, given.strip().encode("latin-1")) and key:
                found = position
        if found is None:
            raise ApiError(
                401,
                f"{kind}: found none that is accepted; send it as 'Authorization: "
                "Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        return f"key {found}"

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names of other hosts, which web pages may make resolve to this one."""
        name = _host_name(headers.get("host", ""))
        if self._hosts and name not in self._hosts:
            raise ApiError(
                403,
                f"host: found {name!r:.80}, accepts {', '.join(sorted(self._hosts))} "
                "(--allowed-host)",
            )

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse requests of web pages that are not this server's own."""
        origin = headers.get("origin")
        if origin is None or self._allows(origin):
            return
        host = _parts(origin).netloc
        if not host or host != headers.get("host"):
            raise ApiError(
                403, f"origin: found {origin!r:.80}, accepts this server's own "
                "pages (--cors-origin)",
            )  # fmt: skip

    def _allows(self, origin: str) -> bool:
        return bool({origin, "*"} & set(self._config.cors_origins))

    def _cors_headers(self, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin")
        if origin is None or not self._allows(origin):
            return []
        pairs = {"access-control-allow-origin": origin, "vary": "origin", **CORS}
        return [(name.encode(), value.encode()) for name, value in pairs.items()]

    def _limited(self, receive: Receive, record: Record) -> Receive:
        """Count the bytes of a body, which need not have a length, and their time."""
        most = self._config.max_body_bytes
        loop = asyncio.get_running_loop()
        began: float | None = None
        is_complete = False

        async def receive_on() -> Any:
            nonlocal began, is_complete
            if is_complete:
                return await receive()
            began = loop.time() if began is None else began
            seconds = self._config.receive_seconds
            seconds += record.body_bytes / BYTES_PER_SECOND
            try:
                async with asyncio.timeout_at(began + seconds):
                    message = await receive()
            except TimeoutError as error:
                raise ApiError(
                    408,
                    f"body: found {record.body_bytes} bytes and no end within "
                    f"{seconds:g} s (--receive-seconds)",
                    code="request_timeout",
                ) from error
            is_complete = not message.get("more_body")
            size = len(message.get("body", b""))
            record.body_bytes += size
            self._held += size
            if record.body_bytes > most:
                raise self._too_large(str(record.body_bytes))
            if self._held > max(OPEN_BYTES, most):
                raise ApiError(
                    503,
                    f"body: the bodies of open requests have {self._held} bytes, "
                    f"accepts {max(OPEN_BYTES, most)}; try again later",
                    code="queue_full",
                    retry_after=1,
                )
            return message

        return receive_on

    def _too_large(self, length: str) -> ApiError:
        return ApiError(
            413,
            f"body: found {length:.20} bytes, accepts {self._config.max_body_bytes} "
            "(--max-body)",
            code="body_too_large",
        )


def _received(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that has arrived, and then what follows it."""
    bodies = [body]

    async def receive_on() -> Any:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        return await receive()

    return receive_on


def _host_name(host: str) -> str:
    """Return a ``Host`` header without its port."""
    return _parts(f"//{host}").hostname or host


def _parts(url: str) -> SplitResult:
    """Return the parts of a URL; all are empty if it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")
