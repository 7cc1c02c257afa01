"""The options of ``inl serve`` for engines in other processes and on other hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.plugin import choose_device, registry
from inl.workers.settings import SECRET_FILE, read_secret

if TYPE_CHECKING:
    from inl.cli.serve_options import FleetOptions, ReplicaOptions
    from inl.config import EngineConfig
    from inl.device import Device
    from inl.fleet.placed_engines import PlacedEngines
    from inl.fleet.server import FleetServer
    from inl.serve.server import FrontEndPort, Server
    from inl.serve.settings import ServerConfig

MODULE = "inl.cli.serve_replica"

FIXED = (
    "address: found none; with --kv-events, whose addresses are those of --replicas, "
    "engines can be restarted only"
)
"""Why no further engine can be started."""


class Mode(Enum):
    """What a command serves."""

    CLIENTS = "clients"
    """Its own models to clients."""
    ENGINE = "engine"
    """A model to front-ends."""
    FLEET = "fleet"
    """Models of other processes to clients."""


def fleet_mode(
    options: FleetOptions,
    models: Sequence[tuple[str, str | None]],
    config: ServerConfig,
    *,
    has_model: bool,
    others: Mapping[str, bool],
) -> Mode:
    """Return what to serve; raises :class:`~inl.errors.RequestError`.

    others: further options that a fleet has no use for, and whether each is given.
    """
    given = {
        "--engine-only": options.engine_only,
        "--replica": bool(options.replica),
        "--replica-file": options.replica_file is not None,
        "--replicas": options.replicas is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    check_replicas(options, has_model=has_model)
    if not names:
        return Mode.CLIENTS
    if len(names) > 1 and options.engine_only:
        raise RequestError(f"{names[1]}: found it with --engine-only; accepts one")
    first = names[0]
    if len(models) > 1:
        raise RequestError(f"{first}: found {len(models)} models, accepts one")
    for name, is_set in (
        ("--frontends", config.frontends),
        ("--idle-unload", config.idle_unload is not None),
        ("--files", config.files is not None),
        *others.items(),
    ):
        if is_set:
            raise RequestError(f"{first}: found it with {name}; accepts one of them")
    return Mode.ENGINE if options.engine_only else Mode.FLEET


def check_replicas(options: ReplicaOptions, *, has_model: bool) -> None:
    """Raise :class:`~inl.errors.RequestError` for options that do not fit."""
    if options.router is not None and not options.is_fleet:
        raise RequestError(
            "--router: found no --replica, --replica-file or --replicas, whose "
            "engines it chooses"
        )
    if options.place is not None and options.replicas is None:
        raise RequestError("--place: found no --replicas, which it is for")
    if options.replica and options.replica_file is not None:
        raise RequestError("--replica-file: found it with --replica; accepts one")
    if options.replicas is None:
        return
    if not has_model and (options.replica or options.replica_file):
        raise RequestError("--replicas: found no MODEL, which the engines load")
    if sys.platform == "win32":
        raise RequestError(
            "--replicas: found it on Windows; start engines with --engine-only, and "
            "name them with --replica"
        )


def secret_of(options: ReplicaOptions) -> bytes | None:
    """Return the secret of engines and front-ends, if there is one."""
    if options.secret_file is not None:
        return read_secret({SECRET_FILE: str(options.secret_file)})
    return read_secret(os.environ)


def engine_port(server: Server, options: FleetOptions) -> FrontEndPort:
    """Return the port of an engine that serves front-ends."""
    from inl.fleet.engine_port import EnginePort

    return EnginePort(server, options.listen, secret_of(options))


def make_fleet(
    options: ReplicaOptions,
    models: Sequence[tuple[str, str | None]],
    config: ServerConfig,
    engine: EngineConfig,
    name: str | None,
    model: str | None,
) -> FleetServer:
    """Return the server of a fleet, which starts its own engines when it serves."""
    from inl.cli.plugin_router import make_plugin_router
    from inl.fleet.local_engines import LocalEngines
    from inl.fleet.replica_file import ReplicaFile
    from inl.fleet.server import FleetServer

    policy = None if options.router is None else make_plugin_router(options.router)
    local: LocalEngines | PlacedEngines | None = None
    file = None
    if options.replica_file is not None:
        file = ReplicaFile(options.replica_file, config.drain_seconds)
        try:
            file.read()
        except OSError as error:
            raise RequestError(
                f"--replica-file {options.replica_file}: {error.strerror}; accepted: "
                "a file with HOST:PORT a line"
            ) from error
    if options.replicas is not None and options.place is not None:
        local = _placed(options.place, options.replicas, models, config, engine)
    elif options.replicas is not None:
        _check_ports(config, options.replicas)
        # The front-end checks keys and counts those of all engines together.
        inner = _behind(config)
        settings = [
            {
                "models": models,
                "server": _changed(_with_kv_events(inner, index)),
                "engine": _changed(replace(engine, backend=device)),
            }
            for index, device in enumerate(_devices(engine.backend, options.replicas))
        ]
        fixed = "" if config.kv_events is None else FIXED
        local = LocalEngines(MODULE, settings, config.drain_seconds, fixed)
    return FleetServer(
        options.replica or (),
        config,
        secret=secret_of(options),
        name=name,
        place=model,
        local=local,
        policy=policy,
        file=file,
    )


def _behind(config: ServerConfig) -> ServerConfig:
    """Return the settings of an engine: others are those of all of them together."""
    return replace(config, api_keys=(), admin_keys=(), max_per_key=None)


def _placed(
    name: str,
    count: int,
    models: Sequence[tuple[str, str | None]],
    config: ServerConfig,
    engine: EngineConfig,
) -> PlacedEngines:
    """Return engines that a place starts; raises :class:`~inl.errors.InlError`."""
    from inl.fleet.placed_engines import PlacedEngines
    from inl.workers.address import parse_worker
    from inl.workers.placed_engine import check_place

    scheme, _, target = name.partition(":")
    check_place(scheme)
    slash = "/" if target and not target.endswith("/") else ""
    place = parse_worker(f"{scheme}:{target}{slash}{engine.backend}")
    if place is None or place.scheme != scheme:
        raise RequestError(
            f"--place: found {name!r:.80}, accepted: PLACE: or PLACE:TARGET/ of an "
            "installed plugin, such as ray: of inl-ray"
        )
    if config.kv_events is not None:
        raise RequestError("--place: found it with --kv-events; accepts one of them")
    settings = {
        "models": models,
        "server": _changed(_behind(config)),
        "engine": _changed(replace(engine, backend=place.device)),
    }
    return PlacedEngines(place, MODULE, settings, count, config.drain_seconds)


def _with_kv_events(config: ServerConfig, index: int) -> ServerConfig:
    """Return the settings of one of several engines: ports and rank are its own.

    vLLM does so with data parallelism: the rank is added to the port, and each batch of
    events carries it.
    """
    if config.kv_events is None:
        return config
    from inl.serve.kv_events import next_endpoint

    return replace(
        config,
        kv_events=next_endpoint(config.kv_events, index),
        kv_events_replay=next_endpoint(config.kv_events_replay, index),
        kv_events_rank=index,
    )


def _check_ports(config: ServerConfig, count: int) -> None:
    """Raise :class:`~inl.errors.RequestError` if engines would share a port."""
    ends = [config.kv_events, config.kv_events_replay]
    ports = [each.rpartition(":")[2] for each in ends if each is not None]
    first, *other = [int(port) if port.isdecimal() else 0 for port in ports] or [0]
    if first and other and other[0] and abs(first - other[0]) < count:
        raise RequestError(
            f"--kv-events-replay: found port {other[0]} beside {first} of --kv-events "
            f"for {count} engines, each of which takes the next ones; accepts ports "
            f"that are {count} apart or more"
        )


def _changed(config: ServerConfig | EngineConfig) -> dict[str, Any]:
    """Return the fields of settings that are not defaults."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return {
        each.name: values[each.name]
        for each in fields(config)
        if values[each.name] != each.default
    }


def _devices(device: str | Device, count: int) -> list[str | Device]:
    """Return the device of each engine: others of its type, as far as there are any."""
    from inl.workers.address import parse_worker

    if ":" in str(device) or parse_worker(device) is not None:
        return [device] * count
    kind = choose_device(device).type
    found = len(registry().find(kind).devices)
    return [f"{kind}:{index % max(found, 1)}" for index in range(count)]
