"""Opens the tiers of blocks that a config asks for."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.kv_tiers.disk_tier import DiskTier
from inl.kv_tiers.record import Identity
from inl.kv_tiers.tiers import BlockTiers, Costs

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.runners.startup import StartedRunner
    from inl.scheduling.plan import SchedulerConfig


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

    Raises :class:`~inl.errors.RequestError` where blocks cannot be stored.
    """
    if not config.has_tiers:
        return None
    reason = ""
    if not (scheduling.prefix_cache and scheduling.use_kv_cache):
        reason = "the engine shares no blocks of prompts"
    elif scheduling.recurrent:
        reason = "every token changes state of the model that blocks do not hold"
    elif scheduling.recomputes_block:
        reason = "a draft head has a cache of its own"
    if identity is None or reason:
        reason = reason or f"{started.device} copies no contents of its cache"
        raise RequestError(f"EngineConfig.kv_host, kv_disk: {reason}; accepted: None")
    disk = None
    if config.disk_tier is not None:
        size, folder = config.disk_tier
        runner = started.runner
        empty = runner.host_array if runner.has_pinned_memory else None
        disk = DiskTier(Path(folder), size, identity, empty=empty)
    return BlockTiers(Costs(), host_bytes=config.host_bytes, disk=disk)
