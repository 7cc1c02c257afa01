"""Options of ``inl serve`` beside those of the engine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inl.cli import arguments
from inl.errors import RequestError

log = logging.getLogger("inl.serve")

MAX_KEYS = 1 << 20
"""Bytes of a file of keys."""

if TYPE_CHECKING:
    from inl.serve.settings import ServerConfig


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Where the server listens."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="Port; 0 chooses a free one.", min=0, max=65535)
    ] = 8000
    frontends: Annotated[
        str,
        typer.Option(
            help="Processes that accept connections: a number, 0 for the engine's own, "
            "or auto."
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Engines in other processes and on other hosts."""

    replicas: Annotated[
        int | None,
        typer.Option(
            help="Engines of MODEL to start on this machine, behind one address.", min=1
        ),
    ] = None
    place: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE:[TARGET/]",
            help="Where --replicas are started, such as ray:, with --device there. "
            "[default: this machine]",
        ),
    ] = None
    replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[dns:]HOST:PORT",
            help="Engine that inl serve --engine-only has started; with dns: those at "
            "all addresses of HOST, now and later. Can be repeated.",
        ),
    ] = None
    replica_file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Engines, one HOST:PORT a line, that the server follows while it "
            "runs; several servers can share it.",
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="Private file with the secret of engines and front-ends on several "
            "hosts, 64 hexadecimal digits. [default: that of INL_WORKER_SECRET_FILE, "
            "or INL_WORKER_SECRET]"
        ),
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Router of a plugin, which chooses the engine of a request.",
        ),
    ] = None

    @property
    def is_fleet(self) -> bool:
        """Whether engines of other processes answer."""
        return bool(self.replica or self.replicas or self.replica_file)


@dataclass(frozen=True, kw_only=True)
class FleetOptions(ReplicaOptions):
    """Engines of other processes, or an engine for them."""

    engine_only: Annotated[
        bool,
        typer.Option(
            "--engine-only", help="Serve front-ends of --replica in place of clients."
        ),
    ] = False
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where an engine waits for front-ends."),
    ] = "127.0.0.1:7000"

    @property
    def is_given(self) -> bool:
        """Whether engines and front-ends are different processes."""
        return self.engine_only or self.is_fleet


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Who may connect, and how connections are encrypted."""

    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that requests must send; can be repeated, or a file as @PATH "
            "with one a line. [default: INL_API_KEY, or none]"
        ),
    ] = None
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key of the admin endpoints, as --api-key. "
            "[default: INL_ADMIN_KEY, or no such endpoints]"
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin whose pages may connect.")
    ] = None
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further accepted Host header.")
    ] = None
    allow_image_hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Host whose images the server fetches for requests; can be repeated. "
            "[default: none]",
        ),
    ] = None
    tls_cert: Annotated[str | None, typer.Option(help="TLS certificate file.")] = None
    tls_key: Annotated[str | None, typer.Option(help="TLS key file.")] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Bounds of requests, of memory and of time."""

    max_adapters: Annotated[
        int | None,
        typer.Option(
            help="Adapters that can be loaded at the same time, with those of "
            "--adapter. [default: their number]",
            min=1,
        ),
    ] = None
    max_adapter_rank: Annotated[
        int | None,
        typer.Option(
            help="Greatest rank of an adapter. [default: that of --adapter, or 16]",
            min=1,
        ),
    ] = None
    idle_unload: Annotated[
        float | None,
        typer.Option(
            help="Seconds without requests after which a model is unloaded. "
            "[default: never]"
        ),
    ] = None
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at the same time. "
            "[default: 32, on CUDA and ROCm 256]",
            min=1,
        ),
    ] = None
    max_queue: Annotated[
        int, typer.Option(help="Requests that wait; more get 503.", min=0)
    ] = 256
    max_queued_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that wait.", min=1)
    ] = 1 << 20
    max_per_key: Annotated[
        int | None, typer.Option(help="Open requests of one key.", min=1)
    ] = None
    max_body: Annotated[int, typer.Option(help="Bytes of a request body.", min=1)] = (
        8 << 20
    )
    max_header: Annotated[
        int, typer.Option(help="Bytes of a request's headers and path.", min=1024)
    ] = 64 << 10
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Open connections, of each front-end. "
            "[default: 10,000, or what the limit of open files allows]",
            min=1,
        ),
    ] = None
    receive_seconds: Annotated[
        float,
        typer.Option(
            help="Time in which a client sends the headers of a request, and again its "
            "body, which has one second more for each 16 KiB."
        ),
    ] = 30.0
    send_seconds: Annotated[
        float,
        typer.Option(
            help="Time after which a client that reads nothing of its answer is "
            "disconnected."
        ),
    ] = 60.0
    idle_seconds: Annotated[
        float,
        typer.Option(help="Time without a request after which a connection is closed."),
    ] = 75.0
    context: arguments.Context = None
    drain_seconds: Annotated[
        float, typer.Option(help="Time to finish requests after SIGTERM.", min=0)
    ] = 120.0


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """What the server keeps of requests."""

    files: Annotated[
        str | None,
        typer.Option(
            help="Folder of uploaded files and batches. [default: there are none]"
        ),
    ] = None
    max_file_bytes: Annotated[
        int, typer.Option(help="Bytes of all files of --files together.", min=1)
    ] = 1 << 30
    max_file_bytes_per_key: Annotated[
        int | None,
        typer.Option(
            help="Bytes of the files of one key together. [default: an equal part of "
            "--max-file-bytes for each key]",
            min=1,
        ),
    ] = None
    stored_responses: Annotated[
        int,
        typer.Option(
            help="Responses that previous_response_id finds, in memory; 0: none.",
            min=0,
        ),
    ] = 1000
    stored_response_bytes: Annotated[
        int, typer.Option(help="Bytes of all stored responses together.", min=1)
    ] = 64 << 20
    stored_response_seconds: Annotated[
        float, typer.Option(help="Time after which a stored response is forgotten.")
    ] = 3600.0


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """What is measured and recorded."""

    vllm_metrics: Annotated[
        bool,
        typer.Option(
            "--vllm-metrics/--no-vllm-metrics",
            help="Export metrics under vLLM's names too.",
        ),
    ] = True
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log each request.")
    ] = True
    otel: Annotated[
        bool,
        typer.Option(
            "--otel/--no-otel",
            help="Send an OpenTelemetry span for each request to "
            "OTEL_EXPORTER_OTLP_ENDPOINT; needs inl-core[otel].",
        ),
    ] = False
    trace: Annotated[
        str | None, typer.Option(help="File that records all steps, for inl replay.")
    ] = None
    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Publish events of the KV cache over ZeroMQ, such as at "
            "tcp://*:5557, for routers that know vLLM; needs inl-core[kv-events]. "
            "[default: none]",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where subscribers ask for events again that they have missed, such "
            "as tcp://*:5558. [default: nowhere]",
        ),
    ] = None
    kv_events_topic: Annotated[
        str,
        typer.Option(
            metavar="TOPIC",
            help="First frame of these events, which llm-d reads as kv@ENGINE@MODEL; "
            "{rank} in it is the number of the engine of --replicas. "
            "[default: empty]",
            show_default=False,
        ),
    ] = ""


def server_config(
    network: NetworkOptions,
    security: SecurityOptions,
    limits: LimitOptions,
    storage: StorageOptions,
    logs: LoggingOptions,
    *,
    frontends: int,
) -> ServerConfig:
    """Return the server's settings; raises :class:`~inl.errors.RequestError`."""
    from inl.serve.settings import ServerConfig

    return ServerConfig(
        host=network.host,
        port=network.port,
        api_keys=_read_keys("--api-key", security.api_key),
        admin_keys=_read_keys("--admin-key", security.admin_key),
        max_queue=limits.max_queue,
        max_queued_tokens=limits.max_queued_tokens,
        max_per_key=limits.max_per_key,
        max_body_bytes=limits.max_body,
        max_header_bytes=limits.max_header,
        max_connections=limits.max_connections,
        receive_seconds=limits.receive_seconds,
        send_seconds=limits.send_seconds,
        idle_seconds=limits.idle_seconds,
        cors_origins=tuple(security.cors_origin or ()),
        allowed_hosts=tuple(security.allowed_host or ()),
        image_hosts=tuple(security.allow_image_hosts or ()),
        drain_seconds=limits.drain_seconds,
        certificate=security.tls_cert,
        private_key=security.tls_key,
        idle_unload=limits.idle_unload,
        files=storage.files,
        max_file_bytes=storage.max_file_bytes,
        max_file_bytes_per_key=storage.max_file_bytes_per_key,
        stored_responses=storage.stored_responses,
        stored_response_bytes=storage.stored_response_bytes,
        stored_response_seconds=storage.stored_response_seconds,
        vllm_metrics=logs.vllm_metrics,
        frontends=frontends,
        kv_events=logs.kv_events,
        kv_events_replay=logs.kv_events_replay,
        kv_events_topic=logs.kv_events_topic,
    )


def _read_keys(option: str, values: list[str] | None) -> tuple[str, ...]:
    """Return the keys of an option, of files, or of the variable INL_API_KEY."""
    if values is None:
        value = os.environ.get(f"INL{option[1:].replace('-', '_').upper()}", "").strip()
        return (value,) if value else ()
    keys: list[str] = []
    for value in values:
        if value.startswith("@"):
            keys += _read_key_file(f"{option} {value}", Path(value[1:]))
        else:
            keys.append(value.strip())
    return tuple(dict.fromkeys(keys))


def _read_key_file(where: str, path: Path) -> list[str]:
    """Return the keys of a file, one a line; a line that begins with # is a comment."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_KEYS + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise RequestError(f"{where}: {reason}; accepts a key, or @PATH") from error
    if len(text) > MAX_KEYS:
        raise RequestError(f"{where}: accepts up to {MAX_KEYS} bytes")
    if os.name == "posix" and mode & 0o077:
        log.warning(
            "%s: other users can read or change the file (mode %04o), and so use its "
            "keys; try: chmod 600 %s", where, mode & 0o7777, path,
        )  # fmt: skip
    first: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if key in first:
            log.warning(
                "%s: line %d has the key of line %d again", where, number, first[key]
            )
        first.setdefault(key, number)
    if not first:
        raise RequestError(f"{where}: found no key, accepts one a line")
    return list(first)
