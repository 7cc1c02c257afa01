"""Opens the tiers of blocks, and the snapshots, that a config asks for.

Without a size in the config, they take what memory has room for.
"""

from __future__ import annotations

import logging
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from inl.config import size_of
from inl.errors import RequestError
from inl.executor.model_loader import takes_snapshots
from inl.kv_tiers.disk_tier import DiskTier
from inl.kv_tiers.host_size import automatic_bytes, free_bytes
from inl.kv_tiers.host_tier import PacedGrowth
from inl.kv_tiers.record import Identity
from inl.kv_tiers.state_snapshots import StateSnapshots, automatic_snapshot_bytes
from inl.kv_tiers.tiers import BlockTiers, Costs

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.runners.startup import StartedRunner
    from inl.scheduling.plan import SchedulerConfig

log = logging.getLogger("inl")

GB = 1e9


def identity_of(
    config: EngineConfig, scheduling: SchedulerConfig, started: StartedRunner
) -> Identity | None:
    """Return what contents of blocks depend on; ``None`` if they cannot be copied."""
    layout = started.runner.cache_layout
    if layout is None:
        return None
    settings = (
        scheduling.model_digest,
        config.quantize,
        config.velocity,
        started.dtype,
    )
    model = sha256(repr(settings).encode()).hexdigest()
    return Identity(model, started.dtype, layout.groups)


def started_tiers(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    identity: Identity | None,
    started: StartedRunner,
) -> BlockTiers | None:
    """Return the tiers of an engine, or ``None`` without any.

    Raises :class:`~inl.errors.RequestError` where the config asks for tiers and blocks
    cannot be stored.
    """
    if config.kv_host is not None and not config.has_tiers:
        return None
    reason = _refusal(scheduling, identity, started)
    if scheduling.recurrent and config.role == "decode" and config.kv_disk is None:
        return None  # the memory is for state that other engines have computed
    if identity is None or reason:
        if not config.has_tiers:
            return None
        raise RequestError(f"EngineConfig.kv_host, kv_disk: {reason}; accepted: None")
    size, may_grow = config.host_bytes, None
    if config.kv_host is None:
        free = free_bytes()
        size = _automatic_bytes(config, identity, started, free)
        may_grow = PacedGrowth(partial(_has_free, free // 2))
        if size:
            log.info(
                "%s: blocks that its cache has no room for take up to %.1f GB of host "
                "memory; change: kv_host", started.device, size / GB,
            )  # fmt: skip
    disk = None
    if config.disk_tier is not None:
        capacity, folder = config.disk_tier
        runner = started.runner
        empty = runner.host_array if runner.has_pinned_memory else None
        disk = DiskTier(Path(folder), capacity, identity, empty=empty)
    if not size and disk is None:
        return None
    return BlockTiers(Costs(), host_bytes=size, may_grow=may_grow, disk=disk)


def _refusal(
    scheduling: SchedulerConfig, identity: Identity | None, started: StartedRunner
) -> str:
    """Return why blocks cannot be stored; empty if they can."""
    if not (scheduling.prefix_cache and scheduling.use_kv_cache):
        return "the engine shares no blocks of prompts"
    if scheduling.recurrent:
        return "every token changes state of the model that blocks do not hold"
    if scheduling.recomputes_block:
        return "a draft head has a cache of its own"
    if identity is None:
        return f"{started.device} copies no contents of its cache"
    return ""


def _automatic_bytes(
    config: EngineConfig, identity: Identity, started: StartedRunner, free: int
) -> int:
    """Return the host memory for blocks where the config says nothing.

    None where copies would delay steps, or pass through a connection to a worker.
    """
    runner = started.runner
    is_shared = runner.is_in_host_memory
    if config.division.count > 1 or not (is_shared or runner.has_pinned_memory):
        return 0
    sizes = zip(runner.limits.blocks, identity.layouts, strict=True)
    cache = sum(count * layout.block_bytes for count, layout in sizes)
    return automatic_bytes(free, cache, is_shared=is_shared, budget=config.cache_bytes)


def _has_free(least: int) -> bool:
    """Whether the host has so much free memory: other processes use it too."""
    return free_bytes() >= least


def started_snapshots(
    model: LanguageModel,
    config: EngineConfig,
    scheduling: SchedulerConfig,
    started: StartedRunner,
) -> StateSnapshots | None:
    """Return the snapshots of an engine, or ``None`` if it takes none."""
    layout = started.runner.cache_layout
    needs = scheduling.recurrent and scheduling.use_kv_cache
    if not needs or layout is None or not layout.slotted or not takes_snapshots(model):
        return None
    size = config.snapshot_host
    capacity = automatic_snapshot_bytes() if size is None else size_of(size)
    return StateSnapshots(capacity) if capacity else None
