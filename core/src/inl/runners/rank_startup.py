"""Starts a group of worker processes that share a model, one for each rank.

A rank is one device, which exchanges tensors with the others; or, with ``hosts`` in the
placement, one host, whose devices are a part of a mesh that one program drives.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inl.backend.collectives import DATA, EXPERT, PIPELINE, TENSOR, Rank, Ranks
from inl.backend.rank_sockets import reserve_address, split_address
from inl.device import Device
from inl.errors import (
    BackendUnavailable,
    DeviceError,
    ProtocolError,
    RequestError,
    RunnerError,
)
from inl.executor.pipeline import Stage, check_stages
from inl.placement.sharding import (
    check_experts,
    check_shares,
    divisible,
    has_experts,
)
from inl.protocol.wire_fields import received, sent
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner
from inl.runners.row_shares import one_rank_limits
from inl.runners.startup import StartedRunner, check_axes, read_options, worker_options
from inl.runners.worker_runner import RETURN_HINT, WorkerRunner
from inl.weights.expert_copies import planned_copies
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights
from inl.workers.address import WorkerAddress, parse_worker
from inl.workers.launchers import HOST_TYPES

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.placement.placement import Placement
    from inl.progress import Progress
    from inl.spec.limits import Limits

FACTORY = "inl.runners.rank_startup:serve_rank"
RANK_AXES = (DATA, PIPELINE, TENSOR, EXPERT)
"""Axes along which ranks that are devices divide a model."""
HOST_AXES = (DATA, TENSOR, EXPERT)
"""Axes along which the program of ranks that are hosts divides it."""
SECRET_BYTES = 32
AGREE_SECONDS = 0.1
"""How often a rank that waits for rank 0's address looks if the group has ended."""
MAX_SECONDS = 3600.0
"""Longest time for ranks to wait for each other, if ``worker_seconds`` is longer."""


def start_ranks(
    language: LanguageModel,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> StartedRunner:
    """Start a worker with a part of the model for each device, or host, of a placement.

    Raises :class:`~inl.errors.WeightMismatch` for a model that cannot be divided, and
    the error of a rank that cannot start; then all workers are stopped.
    """
    placement = config.division
    hosts = placement.hosts > 1
    ranks = placement.hosts if hosts else placement.count
    axes = HOST_AXES if hosts else RANK_AXES
    check_axes(str(config.backend), placement, axes)
    if not hosts:
        check_rows(placement, config)
    check_stages(
        language.model, language.config, placement.pipeline, config.adapter_slots
    )
    model = divisible(language.model, language.config, placement.tensor)
    tree, stored = model.weights(language.config), stored_specs(language.checkpoint)
    check_experts(model, language.config, placement.expert)
    experts = placement.expert
    if not hosts and has_experts(model, language.config):
        experts *= placement.data
    copies = planned_copies(config, experts, is_mesh=hosts)
    if copies is not None:
        assert copies.applied(model, language.config), "they are of this model"
    groups = plan_weights(
        tree, (), stored, ranks=placement.tensor, expert_ranks=experts
    )
    check_shares(groups, model.state(language.config), placement.tensor)
    python, devices = rank_devices(config)
    _check_alike(placement, devices)
    place = parse_worker(config.backend)
    scheme = "worker" if place is None else place.scheme
    address, reserved = reserve_address()
    rendezvous = Rendezvous(address)
    rows = 1 if hosts else placement.data
    own = limits if limits is None else one_rank_limits(limits)
    secret = secrets.token_hex(SECRET_BYTES)
    there = config
    if hosts:
        there = replace(config, mesh=str(placement), placement=None, tensor_parallel=1)
    abandoned = threading.Event()
    dtypes: list[str] = []

    def make(index: int) -> WorkerRunner:
        seconds = min(config.worker_seconds, MAX_SECONDS)

        def options(offer: str) -> dict[str, Any]:
            rank = Rank(
                number=index,
                ranks=ranks,
                address=rendezvous.agree(index, offer, seconds, abandoned),
                seconds=seconds,
                axes=() if hosts else placement.axes,
                secret=secret,
            )
            given = worker_options(language, there, devices[index], own)
            return {**given, "rank": sent(rank)}

        runner = WorkerRunner(
            WorkerAddress(python, devices[index], scheme, placement.count // ranks),
            options,
            factory=FACTORY,
            seat=index,
            seats=ranks,
            progress=progress if index == 0 else None,
            silent_seconds=config.worker_seconds,
            advice="" if config.on_worker_loss == "restart" else RETURN_HINT,
            abandoned=abandoned,
        )
        dtypes.append(runner.dtype)
        return runner

    with closing(reserved):
        group = RankRunner(
            make, ranks, abort=abandoned.set, stages=placement.pipeline,
            copies=1 if hosts else placement.expert, data_ranks=rows,
        )  # fmt: skip
    return StartedRunner(group, ", ".join(devices), dtypes[0])


def check_rows(placement: Placement, config: EngineConfig) -> None:
    """Check that ranks can divide the rows of a step.

    Raises :class:`~inl.errors.RequestError`.
    """
    if placement.data == 1:
        return
    if placement.pipeline > 1:
        raise RequestError(
            f"placement {placement}: found data={placement.data} with "
            f"pipeline={placement.pipeline}; accepted: one of them"
        )
    if (config.decode_steps or 1) > 1:
        raise RequestError(
            f"decode_steps: found {config.decode_steps} with data={placement.data}, "
            "whose ranks would repeat a step unequally often; accepted: None or 1"
        )


def _check_alike(placement: Placement, devices: list[str]) -> None:
    """Check that ranks that share experts choose the same ones for a token.

    Each computes the router, and what comes before it, to the same bits. Raises
    :class:`~inl.errors.DeviceError` for devices of several kinds.
    """
    if placement.expert > 1 and len({Device(name).type for name in devices}) > 1:
        raise DeviceError(
            f"placement {placement}: found devices of several kinds, whose rounding "
            "differs; accepted: equal devices where experts are shared"
        )


class Rendezvous:
    """The address at which rank 0 listens for the others, once its host is known.

    local: address on this host, for ranks that are child processes.
    """

    def __init__(self, local: str) -> None:
        self._local = local
        self._changed = threading.Condition()
        self._first: str | None = None

    def agree(
        self, rank: int, offer: str, seconds: float, abandoned: threading.Event
    ) -> str:
        """Wait until rank 0 has offered an address, and return it.

        offer: that of this rank's host, empty for a child process. Raises
        :class:`~inl.errors.RunnerError` if rank 0 does not start, and
        :class:`~inl.errors.DeviceError` if this rank cannot reach it.
        """
        end = time.monotonic() + seconds
        with self._changed:
            if rank == 0:
                self._first = offer or self._local
                self._changed.notify_all()
            while self._first is None:
                self._changed.wait(AGREE_SECONDS)
                if abandoned.is_set() or time.monotonic() > end:
                    raise RunnerError(f"rank {rank}: rank 0 has not started")
            first = self._first
        if is_loopback(first) and offer and not is_loopback(offer):
            raise DeviceError(
                f"rank {rank} at {offer}: cannot reach rank 0 at {first}, which has "
                "joined by the loopback interface; start its worker with the address "
                "by which other hosts reach the engine"
            )
        return first


def is_loopback(address: str) -> bool:
    """Whether only processes of the same host reach a HOST:PORT."""
    return ipaddress.ip_address(split_address(address)[0]).is_loopback


def rank_devices(config: EngineConfig) -> tuple[str, list[str]]:
    """Return the interpreter, or other target of a place, and the device of each rank.

    Devices are those of the placement, or the named one and those after it; ranks on a
    processor share it. Of a host it is the first one. Raises
    :class:`~inl.errors.DeviceError` for "auto" in a worker.
    """
    placement = config.division
    address = parse_worker(config.backend)
    if address is None:
        from inl.plugin import check_device, host_entry

        python, first = sys.executable, check_device(config.backend)
        if placement.hosts > 1:
            host_entry(first, placement)
    elif address.device == "auto":
        raise DeviceError(
            f"device: found {config.backend!r} for {placement.count} ranks; "
            "name the first device instead of auto"
        )
    else:
        python, first = address.target, Device(address.device)
    if placement.devices:
        return python, [str(Device(name)) for name in placement.devices]
    if placement.hosts > 1:
        return python, [str(first)] * placement.hosts
    step = 0 if first.type in HOST_TYPES else 1
    indices = (first.index + step * rank for rank in range(placement.count))
    return python, [str(Device(first.type, index)) for index in indices]


def serve_rank(options: Mapping[str, Any], progress: Progress) -> StartedRunner:
    """Open one rank's part of a model in a worker (factory).

    options: those of :func:`~inl.runners.startup.serve_model`, and "rank".
    """
    from inl.plugin import make_backend, open_host

    language, config, limits = read_options(options)
    rank = read_rank(options.get("rank"))
    if config.division.hosts > 1:
        backend = open_host(config.backend, config.division, rank)
        runner = start_runner(
            language, backend, config, limits=limits, progress=progress
        )
        return StartedRunner(runner, str(backend.device), runner.loaded.config.dtype)
    backend = make_backend(config.backend)
    backend = joined_backend(backend, rank)
    stage = Stage(rank.position(PIPELINE), rank.size(PIPELINE))
    runner = start_runner(
        language, backend, config, limits=limits, progress=progress,
        rank=rank.position(TENSOR), stage=stage,
    )  # fmt: skip
    return StartedRunner(runner, str(backend.device), runner.loaded.config.dtype)


def read_rank(value: Any) -> Rank:
    """Decode a rank from JSON; raises :class:`~inl.errors.ProtocolError`."""
    fields = received(value, Rank, "OPEN: rank")
    try:
        axes = tuple((str(name), int(size)) for name, size in fields["axes"])
        rank = Rank(**{**fields, "axes": axes})
        assert rank.grid, "checked there"
    except (RunnerError, TypeError, ValueError):
        raise ProtocolError(f"OPEN: rank: found invalid axes {value!r:.120}") from None
    counts = type(rank.number) is int and type(rank.ranks) is int
    texts = isinstance(rank.address, str) and isinstance(rank.secret, str)
    typed = texts and isinstance(rank.seconds, int | float)
    if not (counts and typed and 0 <= rank.number < rank.ranks) or not (
        math.isfinite(rank.seconds) and rank.seconds > 0
    ):
        raise ProtocolError(f"OPEN: rank: found invalid values {value!r:.120}")
    return rank


def joined_backend(backend: Backend, rank: Rank) -> Backend:
    """Return the backend of one rank of a group.

    Waits for the other ranks. Raises :class:`~inl.errors.BackendUnavailable` for a
    backend without ranks along these axes.
    """
    ranks = backend.offers(Ranks)
    if ranks is None:
        raise BackendUnavailable(
            f"{backend.device}: {type(backend).__name__} does not support "
            f"{rank.ranks} ranks; accepted: tensor_parallel=1"
        )
    divided = [name for name, size in rank.grid.items() if size > 1]
    if not set(divided) <= set(ranks.axes):
        raise BackendUnavailable(
            f"{backend.device}: {type(backend).__name__} has ranks along "
            f"{', '.join(ranks.axes)}; found {', '.join(divided)}"
        )
    return ranks.joining(rank)
