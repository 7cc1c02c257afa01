"""Starts a model's runner, in this process or in a worker process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.checkpoints.digest import model_digest
from inl.config import REQUEST_BOUNDS, EngineConfig
from inl.errors import (
    BackendUnavailable,
    ProtocolError,
    RequestError,
    RunnerError,
)
from inl.executor.model_loader import LanguageModel, open_model
from inl.placement.mesh import Meshes
from inl.protocol.runner import Limits, Runner
from inl.protocol.wire_fields import sent
from inl.runners.local_runner import start_runner
from inl.workers.address import WorkerAddress, parse_worker

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.placement.placement import Placement
    from inl.progress import Progress
    from inl.protocol.wire_json import Ready
    from inl.recording.trace_file import RunHeader

log = logging.getLogger("inl")

PARENT_FIELDS = frozenset(
    {
        *REQUEST_BOUNDS,
        "adapters",
        "adaptive_drafts",
        "backend",
        "draft_backend",
        "draft_model",
        "kv_disk",
        "kv_host",
        "kv_peer",
        "kv_store",
        "kv_transport",
        "mmproj",
        "on_worker_loss",
        "placement",
        "restart_device",
        "role",
        "snapshot_host",
        "speculation",
        "tensor_parallel",
        "trace",
        "vision_backend",
        "worker_seconds",
    }
)
"""Fields of EngineConfig that are used by the parent and not sent to workers."""

MAX_RESTARTS = 3
"""Most restarts within WINDOW_SECONDS."""

WINDOW_SECONDS = 60.0


class StartedRunner(NamedTuple):
    """A runner, its device and its dtype."""

    runner: Runner
    device: str
    dtype: str

    @property
    def ready(self) -> Ready:
        """Return what a worker sends of it to its parent."""
        from inl.protocol.wire_json import Ready

        runner = self.runner
        return Ready(runner.limits, self.device, self.dtype, runner.cache_layout)


def start(
    language: LanguageModel,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> StartedRunner:
    """Start a model's runner on ``config.backend``, a device here or in a worker.

    limits: required limits, instead of those for ``config`` and the free memory.
    progress: called with (done, total) of the weights in bytes, then of the programs.
    """
    address = parse_worker(config.backend)
    if language.encoder is not None:
        _check_encoder(language, config)
        if address is None:
            return _start_encoder(language, config, progress)
        return _start_worker(language, config, address, limits, progress)
    if has_ranks(config):
        from inl.runners.rank_startup import start_ranks

        return start_ranks(language, config, limits=limits, progress=progress)
    if address is None:
        return _start_here(language, config, limits, progress)
    return _start_worker(language, config, address, limits, progress)


def _check_encoder(language: LanguageModel, config: EngineConfig) -> None:
    """Raise :class:`RequestError` for an encoder on several devices."""
    if config.division.count > 1 or config.mesh is not None:
        raise RequestError(
            f"{language.name}: is an encoder, found several devices; accepted: one "
            "device of this process or of a worker"
        )


def _start_encoder(
    language: LanguageModel, config: EngineConfig, progress: Progress | None
) -> StartedRunner:
    """Start an encoder's runner in this process."""
    from inl.executor.encoder_executor import load_encoder
    from inl.plugin import make_backend
    from inl.runners.encoder_runner import EncoderRunner

    backend = make_backend(config.backend)
    executor = load_encoder(language, backend, config, progress)
    dtype = executor.loaded.config.dtype
    return StartedRunner(EncoderRunner(executor), str(backend.device), dtype)


def has_ranks(config: EngineConfig) -> bool:
    """Whether several processes share the model, instead of one that drives a mesh.

    Devices of another interpreter are not opened to see; ``mesh`` says that it is one.
    """
    if config.division.hosts > 1:
        return True
    if config.mesh is not None or config.division.count == 1:
        return False
    if config.tensor_parallel > 1 or parse_worker(config.backend) is not None:
        return True
    from inl.plugin import make_backend

    return make_backend(config.backend).offers(Meshes) is None


def check_place(config: EngineConfig) -> None:
    """Check the device of ``config`` before a model is fetched.

    Raises :class:`~inl.errors.DeviceError` as :func:`start` does.
    """
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

    backend = over_mesh(make_backend(config.backend), config.division)
    runner = start_runner(language, backend, config, limits=limits, progress=progress)
    return StartedRunner(runner, str(backend.device), runner.loaded.config.dtype)


def over_mesh(backend: Backend, placement: Placement) -> Backend:
    """Return the backend over the devices of a placement; itself for a single one.

    Raises :class:`~inl.errors.BackendUnavailable` for a device that is not divided by
    meshes or not along such an axis, and where there are fewer devices.
    """
    if placement.count == 1:
        return backend
    meshes = backend.offers(Meshes)
    if meshes is None:
        raise BackendUnavailable(
            f"{backend.device}: mesh: found {placement}; accepted: None on this "
            "device, whose models are divided among processes: placement"
        )
    check_axes(str(backend.device), placement, meshes.axes)
    found: Backend = meshes.over(placement)
    return found


def check_axes(where: str, placement: Placement, axes: Sequence[str]) -> None:
    """Check that a placement has several devices only along these axes.

    Raises :class:`~inl.errors.BackendUnavailable`.
    """
    absent = [f"{name}={size}" for name, size in placement.axes if name not in axes]
    if absent:
        raise BackendUnavailable(
            f"{where}: placement {placement}: found {', '.join(absent)}; models are "
            f"divided along {', '.join(axes) or 'no axis'} there"
        )


def _start_worker(
    language: LanguageModel,
    config: EngineConfig,
    address: WorkerAddress,
    limits: Limits | None,
    progress: Progress | None,
) -> StartedRunner:
    from inl.runners.worker_runner import RETURN_HINT, WorkerRunner

    runner = WorkerRunner(
        address,
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
    """Return the options of :func:`serve_model` for a model on a device there."""
    changed = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in PARENT_FIELDS
        and getattr(config, field.name) != field.default
    }
    if language.quantize:
        changed["quantize"] = language.quantize
    if config.adapter_slots:
        changed["max_adapters"] = config.adapter_slots
    if config.draft_limit:
        changed["max_drafts"] = config.draft_limit
    return {
        "model": str(language.checkpoint.path.absolute()),
        "device": device,
        "config": changed,
        "limits": None if limits is None else sent(limits),
    }


def run_header(language: LanguageModel, started: StartedRunner) -> RunHeader:
    """Return the trace header of a model's runner."""
    from inl.recording.trace_file import RunHeader

    return RunHeader(
        started.runner.limits,
        started.device,
        started.dtype,
        str(language.checkpoint.path.absolute()),
        model_digest(language.checkpoint),
    )


def serve_model(options: Mapping[str, Any], progress: Progress) -> StartedRunner:
    """Open a model in a worker: the default factory of :mod:`inl.runners.worker_main`.

    options: "model", a path; "device"; "config", the fields of
    :class:`~inl.config.EngineConfig` that are not defaults; "limits" or ``None``;
    "rank" of one that opens a part of a model.
    """
    if "rank" in options:
        from inl.runners.rank_startup import serve_rank

        return serve_rank(options, progress)
    language, config, limits = read_options(options)
    return start(language, config, limits=limits, progress=progress)


def read_options(
    options: Mapping[str, Any],
) -> tuple[LanguageModel, EngineConfig, Limits | None]:
    """Decode the options of :func:`worker_options` and open the model's files.

    Raises :class:`~inl.errors.ProtocolError` for invalid options.
    """
    from inl.protocol.wire_json import read_limits

    limits = options.get("limits")
    model, device = options.get("model"), options.get("device")
    config = options.get("config")
    if not (isinstance(model, str) and isinstance(device, str)):
        raise ProtocolError(
            f"OPEN: found model {model!r} and device {device!r}, accepts strings"
        )
    if not isinstance(config, dict):
        raise ProtocolError(f"OPEN: config: found {config!r}, accepts an object")
    known = {field.name for field in fields(EngineConfig)} - PARENT_FIELDS
    if unknown := sorted(config.keys() - known):
        raise ProtocolError(
            f"OPEN: config: found {', '.join(unknown)}; this version of inl-core "
            f"accepts {', '.join(sorted(known))}"
        )
    return (
        open_model(model),
        EngineConfig(backend=device, **config),
        None if limits is None else read_limits(limits, "OPEN"),
    )


class Restarts:
    """Starts a runner in place of a lost one, up to a maximum rate.

    Call it with the error of the loss. After :data:`MAX_RESTARTS` restarts within
    :data:`WINDOW_SECONDS` it raises an error of the same class.
    """

    def __init__(
        self,
        start_runner: Callable[[], Runner],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_runner = start_runner
        self._clock = clock
        self._times: deque[float] = deque(maxlen=MAX_RESTARTS)

    def __call__(self, error: Exception) -> Runner:
        now = self._clock()
        full = len(self._times) == MAX_RESTARTS
        if full and now - self._times[0] < WINDOW_SECONDS:
            kind = type(error) if isinstance(error, RunnerError) else RunnerError
            raise kind(
                f"{MAX_RESTARTS} workers were lost within {WINDOW_SECONDS:g} s; "
                f"the last: {error}"
            ) from error
        self._times.append(now)
        log.warning("restarting the worker: %s", error)
        return self._start_runner()
