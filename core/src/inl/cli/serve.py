"""``inl serve``: serve models over HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inl.adapters.folder import highest_rank
from inl.checkpoints.hub.resolve import find_model
from inl.cli import arguments
from inl.cli.serve_models import count_frontends, make_server, named_models
from inl.config import EngineConfig
from inl.errors import MissingPackage, RequestError

if TYPE_CHECKING:
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing

Name = Annotated[
    str | None, typer.Option(help="Name of the model in requests. [default: its file]")
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        help="Key that requests must send; can be repeated, or a file as @PATH with "
        "one a line. [default: INL_API_KEY, or none]"
    ),
]


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder or GGUF file. [default: SmolLM2-135M-Instruct]"
        ),
    ] = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    kv_dtype: arguments.KvDtype = "auto",
    quantize: arguments.Quantize = None,
    tensor_parallel: arguments.TensorParallel = 1,
    mesh: arguments.Mesh = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 chooses a free one.", min=0, max=65535)
    ] = 8000,
    name: Name = None,
    api_key: Keys = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key of the admin endpoints, as --api-key. "
            "[default: INL_ADMIN_KEY, or no such endpoints]"
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Further model, as PATH or NAME=PATH; can be repeated. Of several "
            "models, each is loaded when a request asks for it.",
        ),
    ] = None,
    adapter: arguments.Adapter = None,
    max_adapters: Annotated[
        int | None,
        typer.Option(
            help="Adapters that can be loaded at the same time, with those of "
            "--adapter. [default: their number]",
            min=1,
        ),
    ] = None,
    max_adapter_rank: Annotated[
        int | None,
        typer.Option(
            help="Greatest rank of an adapter. [default: that of --adapter, or 16]",
            min=1,
        ),
    ] = None,
    speculation: arguments.Speculation = None,
    draft_model: arguments.DraftModel = None,
    draft_device: arguments.DraftDevice = None,
    max_drafts: arguments.MaxDrafts = None,
    adaptive_drafts: arguments.AdaptiveDrafts = True,
    idle_unload: Annotated[
        float | None,
        typer.Option(
            help="Seconds without requests after which a model is unloaded. "
            "[default: never]"
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at the same time. "
            "[default: 32, on CUDA and ROCm 256]",
            min=1,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Requests that wait; more get 503.", min=0)
    ] = 256,
    max_queued_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that wait.", min=1)
    ] = 1 << 20,
    max_per_key: Annotated[
        int | None, typer.Option(help="Open requests of one key.", min=1)
    ] = None,
    max_body: Annotated[int, typer.Option(help="Bytes of a request body.", min=1)] = 32
    << 20,
    context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output.", min=1)
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin whose pages may connect.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further accepted Host header.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="TLS certificate file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="TLS key file.")] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="Time to finish requests after SIGTERM.", min=0)
    ] = 120.0,
    vllm_metrics: Annotated[
        bool,
        typer.Option(
            "--vllm-metrics/--no-vllm-metrics",
            help="Export metrics under vLLM's names too.",
        ),
    ] = True,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log each request.")
    ] = True,
    otel: Annotated[
        bool,
        typer.Option(
            "--otel/--no-otel",
            help="Send an OpenTelemetry span for each request to "
            "OTEL_EXPORTER_OTLP_ENDPOINT; needs inl-core[otel].",
        ),
    ] = False,
    frontends: Annotated[
        str,
        typer.Option(
            help="Processes that accept connections: a number, 0 for the engine's own, "
            "or auto."
        ),
    ] = "auto",
    trace: Annotated[
        str | None, typer.Option(help="File that records all steps, for inl replay.")
    ] = None,
) -> None:
    """Serve MODEL to clients of OpenAI's and Anthropic's APIs."""
    check_packages()
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import exporting_tracing

    config = ServerConfig(
        host=host,
        port=port,
        api_keys=read_keys("--api-key", api_key),
        admin_keys=read_keys("--admin-key", admin_key),
        max_queue=max_queue,
        max_queued_tokens=max_queued_tokens,
        max_per_key=max_per_key,
        max_body_bytes=max_body,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        drain_seconds=drain_seconds,
        certificate=tls_cert,
        private_key=tls_key,
        idle_unload=idle_unload,
        vllm_metrics=vllm_metrics,
        frontends=count_frontends(frontends, device, otel=otel),
    )
    adapters = arguments.adapters(adapter)
    engine = EngineConfig(
        backend=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        tensor_parallel=tensor_parallel,
        mesh=mesh,
        max_batch=max_batch,
        context=context,
        adapters=adapters,
        max_adapters=max_adapters,
        max_adapter_rank=max_adapter_rank
        or max(map(highest_rank, adapters.values()), default=16),
        speculation=speculation,
        draft_model=draft_model,
        draft_backend=draft_device,
        max_drafts=max_drafts,
        adaptive_drafts=adaptive_drafts,
        warm_up=True,
        on_worker_loss="restart",
        trace=trace,
    )
    logging.getLogger("inl.serve.access").disabled = not access_log
    models = named_models(model, name, more or ())
    _serve(models, config, engine, exporting_tracing() if otel else None)


def check_packages() -> None:
    """Raise :class:`MissingPackage` if what the server needs is not installed."""
    try:
        import_module("inl.serve.server")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "inl":
            raise
        raise MissingPackage(
            f"{error.name}, which the server needs, is not installed. "
            "Try: pip install 'inl-core[cli,serve]'"
        ) from error


def read_keys(option: str, values: list[str] | None) -> tuple[str, ...]:
    """Return the keys of an option, of files, or of the variable INL_API_KEY."""
    if values is None:
        value = os.environ.get(f"INL{option[1:].replace('-', '_').upper()}")
        return (value,) if value else ()
    keys: list[str] = []
    for value in values:
        if not value.startswith("@"):
            keys.append(value)
            continue
        try:
            lines = Path(value[1:]).read_text("utf-8").splitlines()
            keys += [line.strip() for line in lines if line.strip()]
        except OSError as error:
            raise RequestError(
                f"{option} {value}: {error.strerror}; accepts a key, or @PATH"
            ) from error
    return tuple(keys)


def _serve(
    models: Sequence[tuple[str, str | None]],
    config: ServerConfig,
    engine: EngineConfig,
    tracing: Tracing | None,
) -> None:
    from inl.serve.http_server import check_settings, loop_factory

    began = time.perf_counter()
    check_settings(config)
    for _, place in models:
        find_model(place)  # of several, each is opened when a request asks for it
    with make_server(models, config, engine, tracing) as server:
        if len(models) == 1 and config.idle_unload is None:
            # As workers do: collecting all loaded objects would pause steps.
            gc.collect()
            gc.freeze()

        def started(url: str) -> None:
            seconds = time.perf_counter() - began
            log = logging.getLogger("inl.serve")
            log.info("%s at %s, %.2f s", server.description, url, seconds)

        async def serve() -> None:
            server.handle_signals()
            await server.serve(started)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())
