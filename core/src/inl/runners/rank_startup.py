"""Starts a tensor-parallel group of worker processes, one for each rank."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.backend.base import Rank, Ranks
from inl.device import Device, DeviceType
from inl.errors import BackendUnavailable, DeviceError, ProtocolError
from inl.placement.sharding import check_shares, divisible
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner
from inl.runners.startup import StartedRunner, read_options, worker_options
from inl.runners.worker_runner import RETURN_HINT, WorkerRunner
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights
from inl.workers.address import WorkerAddress, parse_worker

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.progress import Progress
    from inl.spec.limits import Limits

FACTORY = "inl.runners.rank_startup:serve_rank"
MAX_SECONDS = 3600.0
"""Longest time for ranks to wait for each other, if ``worker_seconds`` is longer."""


def start_ranks(
    language: LanguageModel,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> StartedRunner:
    """Start ``config.tensor_parallel`` workers, each with its part of the weights.

    Raises :class:`~inl.errors.WeightMismatch` for a model that cannot be divided, and
    the error of a rank that cannot start; then all workers are stopped.
    """
    ranks = config.tensor_parallel
    model = divisible(language.model, language.config, ranks)
    tree, stored = model.weights(language.config), stored_specs(language.checkpoint)
    groups = plan_weights(tree, (), stored, ranks=ranks)
    check_shares(groups, model.state(language.config), ranks)
    python, devices = rank_devices(config)
    address = parse_worker(config.backend)
    scheme = "worker" if address is None else address.scheme
    folder = tempfile.mkdtemp(prefix="inl-ranks-")
    abandoned = threading.Event()
    dtypes: list[str] = []

    def make(index: int) -> WorkerRunner:
        seconds = min(config.worker_seconds, MAX_SECONDS)
        meeting = str(Path(folder) / "meeting")
        rank = Rank(number=index, ranks=ranks, meeting=meeting, seconds=seconds)
        options = worker_options(language, config, devices[index], limits)
        runner = WorkerRunner(
            WorkerAddress(python, devices[index], scheme),
            {**options, "rank": rank._asdict()},
            factory=FACTORY,
            seat=index,
            progress=progress if index == 0 else None,
            silent_seconds=config.worker_seconds,
            advice="" if config.on_worker_loss == "restart" else RETURN_HINT,
            abandoned=abandoned,
        )
        dtypes.append(runner.dtype)
        return runner

    try:
        group = RankRunner(make, ranks, abort=abandoned.set)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(group, _remove, folder, os.getpid())
    return StartedRunner(group, ", ".join(devices), dtypes[0])


def _remove(folder: str, process: int) -> None:
    """Remove a folder of this process; forked children leave it to their parent."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def rank_devices(config: EngineConfig) -> tuple[str, list[str]]:
    """Return the interpreter, or other target of a place, and the device of each rank.

    Devices are the named one and those after it; ranks on a CPU share it. Raises
    :class:`~inl.errors.DeviceError` for "auto" in a worker.
    """
    address = parse_worker(config.backend)
    if address is None:
        from inl.plugin import check_device

        python, first = sys.executable, check_device(config.backend)
    elif address.device == "auto":
        raise DeviceError(
            f"device: found {config.backend!r} for {config.tensor_parallel} ranks; "
            "name the first device instead of auto"
        )
    else:
        python, first = address.target, Device(address.device)
    step = 0 if first.type == DeviceType.CPU else 1
    indices = (first.index + step * rank for rank in range(config.tensor_parallel))
    return python, [str(Device(first.type, index)) for index in indices]


def serve_rank(options: Mapping[str, Any], progress: Progress) -> StartedRunner:
    """Open one rank's part of a model in a worker (factory).

    options: those of :func:`~inl.runners.startup.serve_model`, and "rank".
    """
    from inl.plugin import make_backend

    language, config, limits = read_options(options)
    rank = read_rank(options.get("rank"))
    backend = make_backend(config.backend)
    ranks = backend.offers(Ranks)
    if ranks is None:
        raise BackendUnavailable(
            f"{backend.device}: {type(backend).__name__} does not support "
            f"{rank.ranks} ranks; accepted: tensor_parallel=1"
        )
    backend = ranks.joining(rank)
    runner = start_runner(
        language, backend, config, limits=limits, progress=progress, rank=rank.number
    )
    return StartedRunner(runner, str(backend.device), runner.loaded.config.dtype)


def read_rank(value: Any) -> Rank:
    """Decode a rank from JSON; raises :class:`~inl.errors.ProtocolError`."""
    fields = Rank.__annotations__
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise ProtocolError(
            f"OPEN: rank: found {value!r:.120}, accepts {', '.join(fields)}"
        )
    rank = Rank(**value)
    counts = type(rank.number) is int and type(rank.ranks) is int
    typed = isinstance(rank.meeting, str) and isinstance(rank.seconds, int | float)
    if not (counts and typed and 0 <= rank.number < rank.ranks) or not (
        math.isfinite(rank.seconds) and rank.seconds > 0
    ):
        raise ProtocolError(f"OPEN: rank: found invalid values {value!r:.120}")
    return rank
