"""Moves blocks between the runner and the tiers, before the frames of each step."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import OutOfMemory
from inl.forks import on_fork
from inl.kv.tier import BlockMove
from inl.kv_transfer.carried import slot_span, until
from inl.kv_transfer.spans import TokenSpan
from inl.protocol.runner import MAX_READS, BlockWrites, CacheWrite
from inl.spec.cache_layout import SLOT_GROUP, copied
from inl.spec.message import MAX_TRANSFER, READ, WRITE, transfer_frame

if TYPE_CHECKING:
    from inl.kv.block_pool import BlockPool
    from inl.kv_tiers.tiers import BlockTiers
    from inl.kv_transfer.carried import CarriedState
    from inl.protocol.runner import Each, Runner
    from inl.recording.recorder import Recorder
    from inl.scheduling.plan import Plan
    from inl.scheduling.request import Request

LEAST_THREADED, COPIES = 1 << 20, min(os.cpu_count() or 1, 8)
"""Bytes of blocks that are copied in memory on several threads, and how many."""

LEAST_TOKENS = 32
"""Tokens of a step from which the time of one is known; fewer take as long as one."""


class PendingStores(NamedTuple):
    """Blocks of a READ frame whose contents were not collected."""

    step: int
    """The step that the frame precedes."""
    moves: list[BlockMove]


class BlockCopies:
    """Reads evicted blocks and writes stored ones; keeps the order of frames."""

    def __init__(self, tiers: BlockTiers, recorder: Recorder | None) -> None:
        self.tiers, self._recorder = tiers, recorder
        self._reads: deque[PendingStores] = deque()
        self._submitted: dict[int, float] = {}
        """Time at which each step was submitted."""
        self._threads: ThreadPoolExecutor | None = None
        on_fork(self)
        self._collected = 0.0
        """Time at which the last one was collected."""

    def submit(self, plan: Plan, runner: Runner) -> None:
        """Submit the copies of a plan; raises what the runner raises."""
        self._read(plan.stores, runner, plan.step)
        started = time.perf_counter()
        for moves in batches(plan.loads):
            blocks = [self.tiers.take(move.group, move.key) for move in moves]
            frame = transfer_frame(WRITE, moves[0].group, [m.block for m in moves])
            written = BlockWrites(frame, blocks)
            if self._recorder is not None:
                self._recorder.add(written)
            runner.write_blocks(*written, self._each(runner, moves[0].group))
        now = time.perf_counter()
        self.tiers.loaded(now - started)
        self._submitted[plan.step] = now

    def _read(self, stores: Sequence[BlockMove], runner: Runner, step: int) -> None:
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
            self._reads.append(PendingStores(step, moves))

    def collect(self, plan: Plan, runner: Runner) -> None:
        """Store what was read before a step, once it is collected.

        Raises what the runner raises.
        """
        started = max(self._submitted.pop(plan.step), self._collected)
        # Loads may be copied to the device for a while after they are submitted.
        if plan.tokens >= LEAST_TOKENS and not plan.loads:
            seconds = time.perf_counter() - started
            self.tiers.costs.computed(plan.tokens, seconds)
        # What was read before later steps may still be on its way.
        while self._reads and self._reads[0].step <= plan.step:
            self._collect(runner)
        self._collected = time.perf_counter()

    def collect_all(self, runner: Runner) -> None:
        """Store everything that was asked for."""
        while self._reads:
            self._collect(runner)

    def _collect(self, runner: Runner) -> None:
        moves = self._reads[0].moves
        # A part of the batch would keep all of it in memory.
        each = self._each(runner, moves[0].group)
        blocks = runner.read_blocks(len(moves), each)
        self._reads.popleft()
        for move, parts in zip(moves, blocks, strict=True):
            self.tiers.store(move.group, move.key, parts)

    def _each(self, runner: Runner, group: int) -> Each:
        """Return ``map``, on several threads if blocks of the group are large."""
        layout = runner.cache_layout
        assert layout is not None, "blocks are copied"
        if layout.groups[group].block_bytes < LEAST_THREADED:
            return map
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COPIES, thread_name_prefix="inl-copy")
        return self._threads.map

    def after_fork_in_child(self) -> None:
        """Forget the threads, which only the parent has."""
        self._threads = None

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
            self._read(moves, runner, 0)
        self.collect_all(runner)
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


class BlockRun(NamedTuple):
    """Consecutive blocks of a sequence, of which the device has the contents."""

    group: int
    first: int
    """Index of the first one in the sequence."""
    blocks: list[int]
    """Their numbers in the pool."""


def shared_runs(
    pools: Sequence[BlockPool], keys: Sequence[bytes], starts: Sequence[int]
) -> list[BlockRun]:
    """Return the runs of blocks with these keys, as long as a frame holds.

    starts: index of the first key of each group.
    """
    runs: list[BlockRun] = []
    for group, (pool, start) in enumerate(zip(pools, starts, strict=True)):
        run = BlockRun(group, start, [])
        for index in range(start, len(keys)):
            block = pool.find(keys[index])
            if block is None:
                continue
            if run.first + len(run.blocks) != index or len(run.blocks) == MAX_TRANSFER:
                run = BlockRun(group, index, [])
            if not run.blocks:
                runs.append(run)
            run.blocks.append(block)
    return runs


def write_carried(
    runner: Runner, request: Request, state: CarriedState, recorder: Recorder | None
) -> None:
    """Write what a request brings to its blocks and its slot, before its admission.

    Raises what the runner raises.
    """
    for group, blocks in enumerate(state.blocks):
        table = request.block_table[group]
        for at in range(0, len(blocks), MAX_TRANSFER):
            several = blocks[at : at + MAX_TRANSFER]
            frame = transfer_frame(WRITE, group, [table[index] for index, _ in several])
            written = BlockWrites(frame, [parts for _, parts in several])
            if recorder is not None:
                recorder.add(written)
            runner.write_blocks(*written)
    if not state.slot:
        return
    slot = CacheWrite(transfer_frame(WRITE, SLOT_GROUP, [request.slot]), state.slot)
    if recorder is not None:
        recorder.add(slot)
    runner.write(*slot)


def read_sequence(
    runner: Runner, request: Request, tokens: int, recorder: Recorder | None
) -> list[TokenSpan]:
    """Read the state of a running request after so many tokens, which the device has.

    No other READ frame is submitted. Empty if the device has no memory for it. Raises
    what the runner raises.
    """
    size, spans = runner.limits.block_size, []
    for group, table in enumerate(request.block_table):
        first = runner.limits.before_window(group, tokens)
        for at in range(first, -(-tokens // size), MAX_TRANSFER):
            blocks = table[at : min(at + MAX_TRANSFER, -(-tokens // size))]
            span = read_span(runner, BlockRun(group, at, blocks), recorder)
            if span is None:
                return []
            spans += until(span, tokens)
    frame = transfer_frame(READ, SLOT_GROUP, [request.slot])
    try:
        runner.submit(frame)
    except OutOfMemory:
        return []
    if recorder is not None:
        recorder.add(frame)
    return [*spans, slot_span(tokens, copied(runner.read()))]


def read_span(
    runner: Runner, run: BlockRun, recorder: Recorder | None
) -> TokenSpan | None:
    """Read blocks now; ``None`` if the device has no memory for it.

    No other READ frame is submitted. Raises what the runner raises.
    """
    frame = transfer_frame(READ, run.group, run.blocks)
    try:
        runner.submit(frame)
    except OutOfMemory:
        return None
    if recorder is not None:
        recorder.add(frame)
    size = runner.limits.block_size
    return TokenSpan(run.group, run.first * size, size, runner.read())
