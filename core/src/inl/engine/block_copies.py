"""Moves blocks between the runner and the tiers, before the frames of each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from inl.errors import OutOfMemory
from inl.kv.tier import BlockMove
from inl.protocol.runner import MAX_READS, CacheWrite
from inl.spec.cache_layout import BLOCKS, copied, divided, joined
from inl.spec.message import MAX_TRANSFER, READ, WRITE, transfer_frame

if TYPE_CHECKING:
    from inl.kv.block_pool import BlockPool
    from inl.kv_tiers.tiers import BlockTiers
    from inl.protocol.runner import Runner
    from inl.recording.recorder import Recorder
    from inl.scheduling.plan import Plan

LEAST_TOKENS = 32
"""Tokens of a step from which the time of one is known; fewer take as long as one."""


class BlockCopies:
    """Reads evicted blocks and writes stored ones; keeps the order of frames."""

    def __init__(self, tiers: BlockTiers, recorder: Recorder | None) -> None:
        self.tiers, self._recorder = tiers, recorder
        self._reads: deque[list[BlockMove]] = deque()
        """Blocks of each READ frame whose contents were not collected."""
        self._submitted: dict[int, float] = {}
        """Time at which each step was submitted."""
        self._collected = 0.0
        """Time at which the last one was collected."""

    def submit(self, plan: Plan, runner: Runner) -> None:
        """Submit the copies of a plan; raises what the runner raises."""
        self._read(plan.stores, runner)
        started = time.perf_counter()
        for moves in batches(plan.loads):
            parts = [self.tiers.take(move.group, move.key) for move in moves]
            frame = transfer_frame(WRITE, moves[0].group, [m.block for m in moves])
            written = CacheWrite(frame, joined(parts, BLOCKS))
            if self._recorder is not None:
                self._recorder.add(written)
            runner.write(*written)
        now = time.perf_counter()
        self.tiers.loaded(now - started)
        self._submitted[plan.step] = now

    def _read(self, stores: Sequence[BlockMove], runner: Runner) -> None:
        for moves in batches(stores):
            if len(self._reads) == MAX_READS:
                self._collect(runner)
            frame = transfer_frame(READ, moves[0].group, [m.block for m in moves])
            try:
                runner.submit(frame)
            except OutOfMemory:
                continue  # they are not stored
            if self._recorder is not None:
                self._recorder.add(frame)
            self._reads.append(moves)

    def collect(self, plan: Plan, runner: Runner) -> None:
        """Store what was read, once a step is collected.

        Raises what the runner raises.
        """
        started = max(self._submitted.pop(plan.step), self._collected)
        if plan.tokens >= LEAST_TOKENS:
            seconds = time.perf_counter() - started
            self.tiers.costs.computed(plan.tokens, seconds)
        self._collect_all(runner)
        self._collected = time.perf_counter()

    def _collect_all(self, runner: Runner) -> None:
        while self._reads:
            self._collect(runner)

    def _collect(self, runner: Runner) -> None:
        parts, moves = runner.read(), self._reads.popleft()
        shares = divided(parts, len(moves), BLOCKS)
        for move, share in zip(moves, shares, strict=True):
            # A part of the batch would keep all of it in memory.
            self.tiers.store(move.group, move.key, copied(share))

    def flush(self, pools: Sequence[BlockPool], runner: Runner) -> None:
        """Store all blocks that the device shares, and write them to files."""
        if self.tiers.disk is None:
            return
        for group, pool in enumerate(pools):
            moves = [
                BlockMove(group, key, block)
                for key, block in pool.published()
                if not self.tiers.holds(group, key)
            ]
            self._read(moves, runner)
        self._collect_all(runner)
        self.tiers.flush()

    def reset(self) -> None:
        """Drop what was not collected: the runner was reset or replaced."""
        self._reads.clear()
        self._submitted.clear()
        self.tiers.forget_fetched()


def batches(moves: Sequence[BlockMove]) -> Iterator[list[BlockMove]]:
    """Yield moves of one cache group each, as many as a frame holds."""
    ordered = sorted(moves, key=attrgetter("group"))
    for _, several in groupby(ordered, key=attrgetter("group")):
        group = list(several)
        for start in range(0, len(group), MAX_TRANSFER):
            yield group[start : start + MAX_TRANSFER]
