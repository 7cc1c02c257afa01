"""Reads and stores contents of a request's blocks while an engine serves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.engine.fair_lock import FairLock
    from inl.kv_tiers.tiers import BlockTiers
    from inl.kv_transfer.carried import CarriedSpans, CarriedState
    from inl.kv_transfer.spans import TokenSpan
    from inl.scheduling.request import Request
    from inl.spec.cache_layout import Empty, Parts


class BlockAccess:
    """Calls an engine core between its steps. Thread-safe.

    tiers: of the engine, which receive contents.
    """

    def __init__(
        self, core: EngineCore, lock: FairLock, tiers: BlockTiers | None
    ) -> None:
        self._core, self._lock, self._tiers = core, lock, tiers

    @property
    def generation(self) -> int:
        """Times that all blocks were forgotten."""
        return 0 if self._tiers is None else self._tiers.generation

    @property
    def empty(self) -> Empty | None:
        """Allocates memory from which the device copies faster, if it has any."""
        runner = self._core.runner
        return runner.host_array if runner.has_pinned_memory else None

    def keys(self, request: Request) -> list[bytes]:
        """See :meth:`~inl.scheduling.scheduler.Scheduler.block_keys`."""
        return self._lock.run(lambda: self._core.scheduler.block_keys(request))

    def lacking_tokens(self, request: Request) -> int:
        """See :meth:`~inl.engine.core.EngineCore.lacking_tokens`."""
        return self._lock.run(partial(self._core.lacking_tokens, request))

    @property
    def carries_state(self) -> bool:
        """See :attr:`~inl.engine.core.EngineCore.carries_state`."""
        return self._core.carries_state

    def joined_spans(self) -> CarriedSpans:
        """Return what joins the spans of one sequence to blocks of this engine."""
        return self._core.joined_spans()

    def carry(
        self, requests: Sequence[Request], state: CarriedState, room: int
    ) -> bool:
        """See :meth:`~inl.engine.core.EngineCore.carry`."""
        return self._lock.run(partial(self._core.carry, requests, state, room))

    def read(
        self, request: Request, first: Sequence[int], most: int
    ) -> list[TokenSpan]:
        """See :meth:`~inl.engine.core.EngineCore.read_blocks`."""
        return self._lock.run(partial(self._core.read_blocks, request, first, most))

    def store(
        self,
        request: Request,
        group: int,
        blocks: Sequence[tuple[int, Parts]],
        generation: int,
    ) -> int | None:
        """Store contents of a request's blocks; returns how many.

        ``None`` if all blocks were forgotten since :attr:`generation` was read.
        """

        def store() -> int | None:
            if generation != self.generation:
                return None
            return self._core.store_blocks(request, group, blocks)

        return self._lock.run(store)
