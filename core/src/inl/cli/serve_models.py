"""The models of ``inl serve`` and ``inl run-batch``: names, and how they are opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from inl.checkpoints.hub.resolve import DEFAULT_NAME, resolve_model
from inl.cli.progress import loading_bar
from inl.cli.prompt_input import text_of
from inl.device import DeviceType
from inl.errors import RequestError
from inl.plugin import choose_device

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.device import Device
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.records import StepRecord
    from inl.serve.server import Server
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing


BATCH, LARGE_BATCH = 32, 256
"""Requests that run at the same time, by default: on a processor, and on a GPU."""

LEAST_CORES = 4
"""Cores with which front-end processes are started by default."""

MOST_FRONTENDS = 8
"""Most front-end processes that are started by default."""

MOST_GIVEN = 64
"""Most front-end processes that can be asked for."""


def named_models(
    model: str | None, name: str | None, others: Sequence[str]
) -> list[tuple[str, str | None]]:
    """Return the name and the place of each model; ``None`` is the default model.

    model, name: of the first one. others: places, or names with places as NAME=PLACE.
    """
    named: list[tuple[str, str | None]] = []
    if model is not None or name is not None or not others:
        named.append((name or _default_name(model), model))
    for other in others:
        alias, sign, place = other.partition("=")
        # A path may contain the sign too.
        if not sign or not alias or "/" in alias or Path(other).exists():
            alias, place = _default_name(other), other
        named.append((alias, place))
    return [(_printable(alias), place) for alias, place in named]


def _printable(name: str) -> str:
    """Return a name as text that responses can have; a path may have any bytes."""
    return text_of(name).encode("utf-8", "replace").decode()


def _default_name(model: str | None) -> str:
    """Return the file or folder name of a place, and a short name as it is."""
    if model is None:
        return DEFAULT_NAME
    return (Path(model).name or model).removesuffix(":latest")


def make_server(
    models: Sequence[tuple[str, str | None]],
    config: ServerConfig,
    engine: EngineConfig,
    tracing: Tracing | None = None,
) -> Server:
    """Return a server that does not listen yet; loads a single model."""
    from inl.runners.startup import check_place
    from inl.serve.model_slot import ModelSource
    from inl.serve.server import Server, engine_config

    check_place(engine)
    max_batch = engine.max_batch or served_batch(engine.backend)
    # The server loads adapters itself, again without those whose files are gone.
    settings = replace(
        engine_config(engine, config, max_batch),
        adapters=None,
        max_adapters=engine.adapter_slots or None,
    )
    has_bar = len(models) == 1
    traces = _trace_files(engine.trace)
    adapters = engine.adapters or {}
    if adapters and len(models) > 1:
        raise RequestError(
            f"--adapter: found {len(adapters)} beside {len(models)} models, accepts "
            "adapters of a single model"
        )
    sources = [
        ModelSource(
            name,
            _opener(place, settings, traces, has_bar=has_bar),
            adapters,
            place,
            engine.context,
        )
        for name, place in models
    ]
    return Server(sources, config, max_batch=max_batch, tracing=tracing)


def served_batch(device: str | Device) -> int:
    """Return how many requests a server runs at the same time on a device."""
    kind = _device_type(device)
    return LARGE_BATCH if kind in (DeviceType.CUDA, DeviceType.ROCM) else BATCH


def count_frontends(given: str, device: str | Device, *, otel: bool) -> int:
    """Return the number of front-end processes of ``--frontends``.

    auto: none where the engine computes on the processor's cores, or with spans, and
    half of the cores, up to 8, otherwise. Raises
    :class:`~inl.errors.RequestError`.
    """
    if given == "auto":
        cores = os.cpu_count() or 1
        is_busy = _device_type(device) == DeviceType.CPU
        if is_busy or otel or cores < LEAST_CORES or sys.platform != "linux":
            return 0
        return min(cores // 2, MOST_FRONTENDS)
    if not given.isdecimal() or int(given) > MOST_GIVEN:
        raise RequestError(
            f"--frontends: found {given!r:.40}, accepts auto and 0 to {MOST_GIVEN}"
        )
    if int(given) and otel:
        raise RequestError("--frontends: found it with --otel; accepts one of them")
    if int(given) and sys.platform != "linux":
        raise RequestError(
            f"--frontends: found {given} on {sys.platform}, accepts 0; front-ends "
            "share a port as Linux does"
        )
    return int(given)


def _device_type(device: str | Device) -> DeviceType:
    """Return the type of a device, also of one in a worker."""
    from inl.workers.address import parse_worker

    address = parse_worker(device)
    return choose_device(device if address is None else address.device).type


def _trace_files(path: str | Path | None) -> Iterator[str | Path | None]:
    """Yield the trace file of each load of a model: FILE, FILE.2, FILE.3 and so on."""
    yield path
    for number in count(2):
        yield path and f"{path}.{number}"


def _opener(
    place: str | None,
    config: EngineConfig,
    traces: Iterator[str | Path | None],
    *,
    has_bar: bool,
) -> Callable[[Callable[[StepRecord], None]], InferenceEngine]:
    def open_engine(on_step: Callable[[StepRecord], None]) -> InferenceEngine:
        from inl.engine.inference_engine import InferenceEngine

        return InferenceEngine.from_pretrained(
            resolve_model(place),
            replace(config, trace=next(traces)),
            progress=loading_bar() if has_bar else None,
            on_step=on_step,
        )

    return open_engine
