"""Where a model's runner runs: in this process, or in a worker that is started."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.config import EngineConfig
from inl.errors import ProtocolError, RunnerError
from inl.executor.model_loader import (
    LanguageModel,
    compute_dtype,
    open_model,
    start_runner,
)
from inl.protocol.runner import Limits, Runner
from inl.protocol.wire_values import Ready, read_limits
from inl.recording.trace_file import RunHeader
from inl.weights.digest import model_digest
from inl.workers.address import WorkerAddress, parse_worker

if TYPE_CHECKING:
    from inl.weights.progress import Progress

log = logging.getLogger("inl")

PARENTS = frozenset(
    {
        "backend",
        "on_worker_loss",
        "restart_device",
        "tensor_parallel",
        "trace",
        "worker_seconds",
    }
)
"""Fields of EngineConfig that are the parent's affair."""

MOST_RESTARTS = 3
WINDOW_SECONDS = 60.0


class StartedRunner(NamedTuple):
    """A runner, and what it computes on."""

    runner: Runner
    device: str
    dtype: str

    @property
    def ready(self) -> Ready:
        """What a worker tells of it."""
        return Ready(self.runner.limits, self.device, self.dtype)


def start(
    language: LanguageModel,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> StartedRunner:
    """Start a model's runner on ``config.backend``, a device or a worker's.

    limits: what it has to hold, instead of what ``config`` and its memory suggest.
    """
    if config.tensor_parallel > 1:
        from inl.workers.rank_startup import start_ranks

        return start_ranks(language, config, limits=limits, progress=progress)
    address = parse_worker(config.backend)
    if address is None:
        return _start_here(language, config, limits, progress)
    return _start_worker(language, config, address, limits, progress)


def check_place(config: EngineConfig) -> None:
    """Raise what :func:`start` would for the device, before a model is fetched."""
    if parse_worker(config.backend) is None:
        from inl.plugin import check_device

        check_device(config.backend)


def _start_here(
    language: LanguageModel,
    config: EngineConfig,
    limits: Limits | None,
    progress: Progress | None,
) -> StartedRunner:
    from inl.plugin import make_backend

    backend = make_backend(config.backend)
    runner = start_runner(language, backend, config, limits=limits, progress=progress)
    return StartedRunner(
        runner, str(backend.device), compute_dtype(backend, config.dtype)
    )


def _start_worker(
    language: LanguageModel,
    config: EngineConfig,
    address: WorkerAddress,
    limits: Limits | None,
    progress: Progress | None,
) -> StartedRunner:
    from inl.workers.worker_runner import RETURN_HINT, WorkerRunner

    runner = WorkerRunner(
        address.python,
        worker_options(language, config, address.device, limits),
        progress=progress,
        silent_seconds=config.worker_seconds,
        advice="" if config.on_worker_loss == "restart" else RETURN_HINT,
    )
    return StartedRunner(
        runner, str(replace(address, device=runner.device)), runner.dtype
    )


def worker_options(
    language: LanguageModel, config: EngineConfig, device: str, limits: Limits | None
) -> dict[str, Any]:
    """What :func:`serve_model` is told of a model on a device there."""
    changed = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in PARENTS and getattr(config, field.name) != field.default
    }
    return {
        "model": str(language.checkpoint.path.absolute()),
        "device": device,
        "config": changed,
        "limits": None if limits is None else asdict(limits),
    }


def run_header(language: LanguageModel, served: StartedRunner) -> RunHeader:
    """What the flight recorder says of a model's runner."""
    return RunHeader(
        served.runner.limits,
        served.device,
        served.dtype,
        str(language.checkpoint.path.absolute()),
        model_digest(language.checkpoint),
    )


def serve_model(options: Mapping[str, Any], progress: Progress) -> StartedRunner:
    """Open a model in a worker: the factory that :mod:`inl.workers.worker_main` uses.

    options: "model", a path; "device"; "config", fields of
    :class:`~inl.config.EngineConfig` other than the defaults; perhaps "limits".
    """
    language, config, limits = read_options(options)
    return start(language, config, limits=limits, progress=progress)


def read_options(
    options: Mapping[str, Any],
) -> tuple[LanguageModel, EngineConfig, Limits | None]:
    """Read what :func:`worker_options` wrote, and open the model's files."""
    limits = options.get("limits")
    model, device = options.get("model"), options.get("device")
    config = options.get("config")
    if not (isinstance(model, str) and isinstance(device, str)):
        raise ProtocolError(f"OPEN: found model {model!r} and device {device!r}")
    if not isinstance(config, dict):
        raise ProtocolError(f"OPEN: config: found {config!r}, accepts an object")
    known = {field.name for field in fields(EngineConfig)} - PARENTS
    if unknown := sorted(config.keys() - known):
        raise ProtocolError(
            f"OPEN: config: found {', '.join(unknown)}, which this inl-core does not "
            f"know; accepts {', '.join(sorted(known))}"
        )
    return (
        open_model(model),
        EngineConfig(backend=device, **config),
        None if limits is None else read_limits(limits, "OPEN"),
    )


class Restarts:
    """Starts a runner in place of a lost one, but not endlessly.

    Called with the error; raises it, with the times counted, once there were
    :data:`MOST_RESTARTS` within :data:`WINDOW_SECONDS`.
    """

    def __init__(
        self,
        begin: Callable[[], Runner],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin = begin
        self._clock = clock
        self._times: deque[float] = deque(maxlen=MOST_RESTARTS)

    def __call__(self, error: RunnerError) -> Runner:
        now = self._clock()
        full = len(self._times) == MOST_RESTARTS
        if full and now - self._times[0] < WINDOW_SECONDS:
            raise type(error)(
                f"{MOST_RESTARTS} workers were lost within {WINDOW_SECONDS:g} s; "
                f"the last: {error}"
            ) from error
        self._times.append(now)
        log.warning("starting another worker: %s", error)
        return self._begin()
