"""Settings of a server, each with a default."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from inl.errors import RequestError

LOOPBACK = ("127.0.0.1", "::1", "localhost")

BYTES_PER_SECOND = 16 << 10
"""Least rate of a client, beyond the time that it may wait."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Address, access and bounds of a server.

    Raises :class:`~inl.errors.RequestError` for a value that is not accepted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose one."""
    api_keys: tuple[str, ...] = ()
    """Keys of which each request must send one; none: requests need no key."""
    admin_keys: tuple[str, ...] = ()
    """Keys of which each request to an admin endpoint must send one; none: there are no
    admin endpoints."""
    max_queue: int = 256
    """Maximum number of requests that wait to run; more are refused with 503."""
    max_queued_tokens: int = 1 << 20
    """Maximum number of prompt tokens that wait to run."""
    max_per_key: int | None = None
    """Maximum number of open requests of one key; more are refused with 429."""
    max_body_bytes: int = 8 << 20
    """Maximum size of a request body."""
    max_header_bytes: int = 64 << 10
    """Maximum size of a request's headers with its path."""
    max_connections: int | None = None
    """Maximum number of open connections of one process; ``None``: 10,000, or what the
    limit of open files allows."""
    receive_seconds: float = 30.0
    """Time in which a client sends the headers of a request, and again its body; a body
    has one second more for each 16 KiB."""
    send_seconds: float = 60.0
    """Time after which a client that takes nothing of its answer is disconnected."""
    idle_seconds: float = 75.0
    """Time without a request after which a connection is closed."""
    frontend_seconds: float = 30.0
    """Time without a reply after which a front-end is replaced."""
    cors_origins: tuple[str, ...] = ()
    """Web origins, besides the server's own, whose pages may send requests."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted ``Host`` headers, besides those of the address. A server that does not
    listen on loopback accepts all if there are none."""
    image_hosts: tuple[str, ...] = ()
    """Hosts, or HOST:PORT, of which images of requests are fetched; none: no images
    are."""
    drain_seconds: float = 120.0
    """Time that open requests have to finish after SIGTERM."""
    keep_alive_seconds: float = 15.0
    """Time without an event after which a stream sends a comment line."""
    certificate: str | None = None
    """TLS certificate file."""
    private_key: str | None = None
    """Key file of the TLS certificate."""
    idle_unload: float | None = None
    """Seconds without requests after which a model is unloaded; ``None`` keeps it."""
    vllm_metrics: bool = True
    """Whether metrics are exported under vLLM's names too."""

    files: str | None = None
    """Folder of uploaded files and batches; ``None``: there are none."""
    max_file_bytes: int = 1 << 30
    """Maximum size of all files together."""
    max_file_bytes_per_key: int | None = None
    """Maximum size of the files of one key together; ``None``: an equal part of
    ``max_file_bytes`` for each key."""

    stored_responses: int = 1000
    """Maximum number of responses that later ones can continue; 0 stores none."""
    stored_response_bytes: int = 64 << 20
    """Maximum size of all stored responses together."""
    stored_response_seconds: float = 3600.0
    """Time after which a stored response is forgotten."""
    frontends: int = 0
    """Processes that accept connections; 0: the engine's own does."""
    kv_events: str | None = None
    """Address of ZeroMQ at which events of the KV cache are published, for routers that
    know vLLM; ``None``: nowhere."""
    kv_events_replay: str | None = None
    """Address of ZeroMQ at which they can be asked for again."""
    kv_events_topic: str = ""
    """First frame of these events, which llm-d reads as ``kv@ENGINE@MODEL``. If there
    is one, it also precedes what is sent again."""
    kv_events_rank: int = 0
    """Number of the engine among those of a server, which these events carry as vLLM's
    data-parallel rank."""

    def __post_init__(self) -> None:
        for name in (
            "max_queue",
            "max_queued_tokens",
            "max_body_bytes",
            "max_file_bytes",
            "stored_responses",
            "stored_response_bytes",
        ):
            if getattr(self, name) < 0:
                raise RequestError(
                    f"{name}: found {getattr(self, name)}, accepts 0 and above"
                )
        for name in (
            "receive_seconds", "send_seconds", "idle_seconds", "frontend_seconds",
            "idle_unload", "max_header_bytes", "max_connections",
            "max_file_bytes_per_key",
            "stored_response_seconds",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                shown = name.replace("_", " ")
                raise RequestError(f"{shown}: found {value}, accepts values above 0")
        if self.kv_events_replay is not None and self.kv_events is None:
            raise RequestError("kv events replay: found no kv events; pass both")
        if self.kv_events_topic and self.kv_events is None:
            raise RequestError("kv events topic: found no kv events; pass both")
        if self.private_key is not None and self.certificate is None:
            raise RequestError("private key: found no certificate; pass both files")
        for name, keys in (("api key", self.api_keys), ("admin key", self.admin_keys)):
            if any(not key for key in keys):
                raise RequestError(
                    f"{name}: found an empty one; accepted: any other text"
                )
        if set(self.api_keys) & set(self.admin_keys):
            raise RequestError("admin key: found an api key; accepts another one")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        return self.host in LOOPBACK
