"""``inl serve``: serve models over HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from inl.checkpoints.hub.resolve import find_model
from inl.cli import arguments
from inl.cli.option_groups import SpeculativeOptions, with_groups
from inl.cli.serve_fleet import Mode, engine_port, fleet_mode, make_fleet
from inl.cli.serve_models import count_frontends, make_server, named_models
from inl.cli.serve_options import (
    FleetOptions,
    LimitOptions,
    LoggingOptions,
    NetworkOptions,
    SecurityOptions,
    StorageOptions,
    server_config,
)
from inl.errors import MissingPackage, RequestError
from inl.install_command import install_command

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.fleet.server import FleetServer
    from inl.serve.server import Server
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing


@with_groups
def run(
    *,
    model: arguments.ModelArgument = None,
    engine_options: SpeculativeOptions,
    network: NetworkOptions,
    fleet: FleetOptions,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model in requests. [default: its file]"),
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
    role: Annotated[
        str,
        typer.Option(
            metavar="both|prefill|decode",
            help="Whether prompts are computed for other engines, or by them.",
        ),
    ] = "both",
    kv_peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Where the role prefill listens, or addresses of such engines. "
            "[default: none]",
        ),
    ] = None,
    kv_store: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:ADDRESS",
            help="A plugin's store of blocks that engines share, such as "
            "mooncake:10.0.0.1:50051; needs --kv-host. [default: none]",
        ),
    ] = None,
    kv_transport: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A plugin's transport of contents between these engines, such as "
            "nixl. [default: none]",
        ),
    ] = None,
    limits: LimitOptions,
    security: SecurityOptions,
    storage: StorageOptions,
    logs: LoggingOptions,
) -> None:
    """Serve MODEL to clients of OpenAI's and Anthropic's APIs."""
    check_packages()
    from inl.serve.tracing import exporting_tracing

    config = server_config(
        network,
        security,
        limits,
        storage,
        logs,
        frontends=count_frontends(
            "0"
            if fleet.is_given and network.frontends == "auto"
            else network.frontends,
            engine_options.device,
            otel=logs.otel,
        ),
    )
    adapters = arguments.adapter_settings(arguments.adapters(adapter))
    if limits.max_adapter_rank is not None:
        adapters["max_adapter_rank"] = limits.max_adapter_rank
    engine = engine_options.config(
        max_batch=limits.max_batch,
        context=limits.context,
        max_adapters=limits.max_adapters,
        warm_up=True,
        on_worker_loss="restart",
        trace=logs.trace,
        role=role,
        kv_peer=kv_peer,
        kv_store=kv_store,
        kv_transport=kv_transport,
        **adapters,
    )
    logging.getLogger("inl.serve.access").disabled = not logs.access_log
    models = named_models(model, name, more or ())
    if len(models) > 1 and role != "both":
        raise RequestError(
            f"--role: found {role!r} with {len(models)} models, accepts both there"
        )
    traced = logs.trace is not None and not fleet.engine_only
    mode = fleet_mode(
        fleet,
        models,
        config,
        has_model=model is not None,
        others={"--otel": logs.otel, "--trace": traced},
    )
    if mode is Mode.FLEET:
        _serve_fleet(make_fleet(fleet, models, config, engine, name, model))
        return
    tracing = exporting_tracing() if logs.otel else None
    _serve(models, config, engine, tracing, fleet if mode is Mode.ENGINE else None)


def check_packages() -> None:
    """Raise :class:`MissingPackage` if what the server needs is not installed."""
    try:
        import_module("inl.serve.server")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "inl":
            raise
        raise MissingPackage(
            f"{error.name}, which the server needs, is not installed. "
            f"Try: {install_command('inl-core[cli,serve]')}"
        ) from error


def _serve(
    models: Sequence[tuple[str, str | None]],
    config: ServerConfig,
    engine: EngineConfig,
    tracing: Tracing | None,
    port: FleetOptions | None,
) -> None:
    """Serve models to clients, or with ``port`` to front-ends of other processes."""
    from inl.serve.http_server import check_settings, raise_open_files

    began = time.perf_counter()
    raise_open_files()
    if port is None:
        check_settings(config)
    for _, place in models:
        find_model(place)  # of several, each is opened when a request asks for it
    with make_server(models, config, engine, tracing) as server:
        if port is not None:
            server.port = engine_port(server, port)
        if len(models) == 1 and config.idle_unload is None:
            # As workers do: collecting all loaded objects would pause steps.
            gc.collect()
            gc.freeze()

        _run(server, began)


def _serve_fleet(server: FleetServer) -> None:
    from inl.serve.http_server import check_settings, raise_open_files

    began = time.perf_counter()
    raise_open_files()
    check_settings(server.config)
    _run(server, began)


def _run(server: Server | FleetServer, began: float) -> None:
    """Serve until a signal."""
    from inl.serve.http_server import loop_factory
    from inl.serve.signals import handle_signals

    def started(url: str) -> None:
        seconds = time.perf_counter() - began
        log = logging.getLogger("inl.serve")
        log.info("%s at %s, %.2f s", server.description, url, seconds)

    async def serve() -> None:
        handle_signals(server.stop)
        await server.serve(started)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())
