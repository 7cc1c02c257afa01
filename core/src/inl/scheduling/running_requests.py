"""Requests that have a slot at the runner, and the blocks that they occupy."""

from __future__ import annotations

from collections.abc import Sequence

from inl.kv.block_pool import BlockPool
from inl.kv.kv_cache_manager import KVCacheManager
from inl.kv.kv_events import BlocksCleared, MergedEvents, OnKVEvent
from inl.kv.prefix_cache import PrefixCache
from inl.kv.snapshots import Restore, Snapshot, SnapshotIndex
from inl.kv.tier import Tier
from inl.protocol.runner import Limits
from inl.scheduling.plan import SchedulerConfig, StepBuilder
from inl.scheduling.request import Carried, Request, Status
from inl.scheduling.waiting_queue import WaitingQueue
from inl.spec.message import (
    FEEDBACK,
    BlockTableUpdate,
    Row,
    max_block_table_updates,
)

ROW_TOKENS = 64
"""Cached tokens for which a request may go to a rank with one more request than
another."""


class RunningRequests:
    """Admits requests to slots, grows their block tables and preempts them."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        limits: Limits,
        kv_cache: KVCacheManager | None = None,
        tier: Tier | None = None,
        snapshots: SnapshotIndex | None = None,
    ) -> None:
        self._config, self._tier, self._snapshots = config, tier, snapshots
        self._waiting = waiting
        self.by_id: dict[int, Request] = {}
        """In order of admission."""
        self.preemptions = 0
        """Times that a request lost its blocks to an earlier one."""
        self.prefix_hit_tokens = 0
        """Tokens that admissions took from the prefix cache."""
        self._on_kv_event: OnKVEvent | None = None
        self.reset(limits, kv_cache)

    def reset(self, limits: Limits, kv_cache: KVCacheManager | None = None) -> None:
        """Start with empty slots and blocks on a new runner, with no requests."""
        self.by_id.clear()
        self._block_size, ranks = limits.block_size, limits.data_ranks
        self.kv_caches = [
            kv_cache
            or KVCacheManager(
                [BlockPool(blocks, limits.block_size) for blocks in limits.blocks],
                limits.windows,
                tier=self._tier,
                snapshots=self._snapshots,
            )
            for _ in range(ranks)
        ]
        """Block tables of the requests of each rank."""
        for cache in self.kv_caches:
            if cache.snapshots is not None:
                cache.snapshots.clear()  # a new runner has none of the blocks
        if self._on_kv_event is not None:
            self.report_kv_events(self._on_kv_event)
        cached = self._config.use_kv_cache
        self.prefix_caches = [
            PrefixCache(self._config, cache) if cached else None
            for cache in self.kv_caches
        ]
        """Shared blocks of each rank."""
        windowed = any(window is not None for window in self.kv_caches[0].windows)
        self.has_windows = windowed and self._config.use_kv_cache
        slots = range(limits.slots - 1, 0, -1)
        self._slots = [
            [slot for slot in slots if (slot - 1) % ranks == rank]
            for rank in range(ranks)
        ]
        """Free slots of each rank."""
        self._running = [0] * ranks
        """Running requests of each rank."""
        self._releases: list[int] = []
        self._restores: list[Restore] = []
        self._snapshots_due: list[Snapshot] = []
        """Those of prompts in the step that is planned."""

    def report_kv_events(self, on_event: OnKVEvent) -> None:
        """Report what happens to shared blocks from now on, as if there were none."""
        self._on_kv_event = on_event
        reported = on_event if len(self.kv_caches) == 1 else MergedEvents(on_event)
        for cache in self.kv_caches:
            cache.report(reported)
        on_event(BlocksCleared())

    @property
    def has_releases(self) -> bool:
        """Whether slots were released that the runner does not know of."""
        return bool(self._releases)

    def take_releases(self) -> list[int]:
        """Return the slots released since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def count_growing(self) -> list[int]:
        """Return how many requests of each rank will need more blocks."""
        counts = [0] * len(self.kv_caches)
        for request in self.by_id.values():
            counts[request.data_rank] += self.needs_more_blocks(request)
        return counts

    def open_ranks(
        self, request: Request, budgets: Sequence[int], least: int, rows: int
    ) -> Sequence[int]:
        """Return the ranks that have room for a request in a step, the best one first.

        That is the one with the fewest tokens to compute for it, and few requests.
        budgets: tokens that each rank still has room for, of which the request needs
        ``least``. rows: most requests of a rank.
        """
        ranks = [
            rank
            for rank, budget in enumerate(budgets)
            if budget >= least and self._running[rank] < rows
        ]
        if len(ranks) < 2:
            return ranks
        size = self._block_size

        def cost(rank: int) -> int:
            cache, hits = self.prefix_caches[rank], 0
            if cache is not None:
                keys = cache.keys(request, (len(request.tokens) - 1) // size)
                hits = self.kv_caches[rank].cached_prefix(keys)
            return self._running[rank] * ROW_TOKENS - hits * size

        return sorted(ranks, key=cost)

    def try_admit(self, request: Request, growing: int, rank: int = 0) -> bool:
        """Allocate a slot and blocks of a rank for the head of the queue.

        ``False`` if full, or if steps in flight compute most of its prompt.
        growing: running requests that will need more blocks than they have.
        """
        size, prefix_cache = self._block_size, self.prefix_caches[rank]
        kv_cache = self.kv_caches[rank]
        length = len(request.tokens)
        prefill_len = self.prefill_len(request)
        keys: list[bytes] = []
        # The last token is always computed: its hidden state gives the next one.
        most = prefill_len - 1
        if request.prompt_logprobs is not None:
            # Tokens without a log-probability are computed again. A step of the
            # kind that computes the first token computes one of them at least.
            known = len(request.prompt_token_logprobs) - 1
            last = (request.scored_from or request.prompt_tokens - 1) - 1
            most = max(min(known, last), 0)
        if prefix_cache is not None:
            keys = prefix_cache.keys(request, most // size)
            if prefix_cache.must_wait(keys, prefill_len):
                return False
        carried = self._usable(request, most)
        # Blocks that are cached without the state after them are of no use.
        if carried is not None and keys and not self._config.recurrent:
            has_more = kv_cache.cached_prefix(keys) * size >= carried.tokens
            carried = None if has_more else carried
        if carried is None:
            request.carried = None
        else:
            keys = []
        # One block is spared per growing request, which would preempt this one.
        options = {"recomputes_block": True} if self._config.recomputes_block else {}
        while True:
            allocated = kv_cache.admit(
                keys, -(-length // size), spare=growing, **options
            )
            if allocated is None:
                return False
            table, shared = allocated
            if prefix_cache is not None and kv_cache.last_loaded:
                prefix_cache.announce(request, keys, kv_cache.last_loaded)
            if (whole := request.whole(shared * size)) == shared * size:
                break
            # All tokens of a span are computed in one step: share less.
            kv_cache.release(table, 0)
            keys = keys[: whole // size]
        request.block_table, request.published_blocks = table, shared
        request.freed_window_blocks = [table.count(0) for table in request.block_table]
        if carried is not None:
            # Blocks before a window have no contents, and must not be shared.
            windowed = any(window is not None for window in kv_cache.windows)
            request.published_blocks = carried.tokens // size if windowed else 0
        request.cached_tokens = request.scheduled = (
            shared * size if carried is None else carried.tokens
        )
        request.prefill_len, request.host_token_count = prefill_len, length
        cached = self._config.use_kv_cache
        request.max_scheduled = request.max_length - 1 if cached else length
        if request.ends_scored and request.prompt_tokens > 1:
            request.prefill_len = request.max_scheduled = request.prompt_tokens - 1
        self._waiting.pop()
        request.data_rank, request.slot = rank, self._slots[rank].pop()
        self._running[rank] += 1
        self._plan_snapshots(request, keys)
        request.feedback_row = Row(request.slot, FEEDBACK)
        request.status = Status.RUNNING
        self.prefix_hit_tokens += request.cached_tokens
        self.by_id[request.id] = request
        return True

    def _plan_snapshots(self, request: Request, keys: list[bytes]) -> None:
        """Note which state an admitted request needs, and which it leaves.

        keys: of the blocks that it may share.
        """
        request.snapshot_borders, request.last_snapshot = (), request.scheduled
        cache = self.prefix_caches[request.data_rank]
        kv_cache = self.kv_caches[request.data_rank]
        is_taken = kv_cache.snapshots is not None
        request.has_snapshots = is_taken and cache is not None and cache.serves(request)
        if not request.has_snapshots or not keys:
            return
        size, shared = self._block_size, request.published_blocks
        if shared:
            self._restores.append(Restore(request.slot, keys[shared - 1]))
        # Where blocks are cached beyond the snapshots, another prompt was different.
        ends = {kv_cache.cached_prefix(keys), len(keys)}
        ends.add(min((request.prompt_tokens - 1) // size, len(keys)))
        borders: list[int] = []
        for border in sorted(end * size for end in ends):
            last = borders[-1] if borders else request.scheduled
            divides_span = request.whole(border) != border
            if border - last >= self._config.snapshot_tokens and not divides_span:
                borders.append(border)
        request.snapshot_borders = tuple(borders)

    def take_restores(self) -> list[Restore]:
        """Return the state that admissions since the last call need."""
        restores, self._restores = self._restores, []
        return restores

    def chunk_stop(self, request: Request, budget: int) -> int:
        """Return where the next chunk of a request's prompt ends."""
        start = request.scheduled
        stop = min(request.chunk_stop(start), start + budget)
        if request.has_snapshots:
            stop = self._snapshot_stop(request, start, stop)
        return request.whole(stop)

    def _snapshot_stop(self, request: Request, start: int, stop: int) -> int:
        """Return ``stop``, or an earlier border at which a snapshot can be taken."""
        for border in request.snapshot_borders:
            if start < border < stop:
                return border
        border = stop - stop % self._block_size
        is_last = stop >= request.prefill_len
        if is_last or border <= start or request.whole(border) != border:
            return stop
        return border

    @property
    def _interval(self) -> int:
        """Tokens between snapshots of an output, a multiple of the block size."""
        size = self._block_size
        return -(-self._config.snapshot_interval // size) * size

    def steps_to_snapshot(self, request: Request, start: int, steps: int) -> int:
        """Return the decoding steps from ``start`` that end at a snapshot, or before.

        steps: the most.
        """
        if not request.has_snapshots:
            return steps
        return min(steps, self._interval - start % self._interval)

    def take_snapshots(self, step: StepBuilder) -> list[Snapshot]:
        """Return the snapshots to take after a step."""
        found, self._snapshots_due = self._snapshots_due, []
        if all(cache.snapshots is None for cache in self.kv_caches):
            return found
        interval = self._interval
        for request, _, stop, drafts in step.chunks[: step.decode_rows]:
            if drafts is None and request.has_snapshots and not stop % interval:
                request.last_snapshot = stop
                found.append(Snapshot(request, request.slot, stop))
        return found

    def _take_snapshot(self, step: StepBuilder, request: Request, stop: int) -> None:
        """Take a snapshot of a prompt after a step, unless there is one already."""
        cache = self.prefix_caches[request.data_rank]
        if cache is None or stop % self._block_size or stop > request.prefill_len:
            return
        passed = stop - request.last_snapshot
        if stop not in request.snapshot_borders and passed < self._interval:
            return
        request.last_snapshot = stop
        if cache.begin_snapshot(request, stop, step.step):
            self._snapshots_due.append(Snapshot(request, request.slot, stop))

    def _usable(self, request: Request, most: int) -> Carried | None:
        """Return the contents that a request brings, if it can begin with them.

        most: leading tokens that are not computed.
        """
        carried, config = request.carried, self._config
        if (
            carried is None
            or not config.use_kv_cache
            or config.recomputes_block
            or len(self.kv_caches) > 1  # ranks with blocks of their own
            or request.pooled
            or request.embeddings is not None
            or carried.tokens > most
        ):
            return None
        return carried

    def schedule(self, step: StepBuilder, request: Request, stop: int) -> None:
        """Add a chunk of a request's known tokens up to ``stop`` to a step."""
        step.schedule(request, stop)
        prefix_cache = self.prefix_caches[request.data_rank]
        if prefix_cache is not None:
            prefix_cache.begin(request, step.step)
        if request.has_snapshots:
            self._take_snapshot(step, request, request.scheduled)

    def complete_step(self, step: int) -> None:
        """Record that ``step`` is collected."""
        for cache in self.kv_caches:
            cache.complete_step(step)
        for prefix_cache in self.prefix_caches:
            if prefix_cache is not None:
                prefix_cache.complete_step(step)

    def prefill_len(self, request: Request) -> int:
        """Return the number of tokens to compute in chunks at an admission."""
        known = len(request.tokens)
        return request.prompt_tokens if self._config.replay else known

    def needs_more_blocks(self, request: Request) -> bool:
        """Whether a request may need more blocks than it has."""
        return len(request.block_table[0]) * self._block_size < request.max_length - 1

    def allocate(self, request: Request, tokens: int) -> bool:
        """Grow a request's table to ``tokens``; ``False`` if blocks are missing.

        Blocks that were appended before one was missing stay in the table.
        """
        size = self._block_size
        while len(request.block_table[0]) * size < tokens:
            if not self.grow(request):
                return False
        return True

    def grow(self, request: Request) -> bool:
        """Append a block to a request's table, preempting the latest arrivals there.

        Returns ``False`` if blocks are about to be freed, or if the request itself was
        preempted.
        """
        rank = request.data_rank
        while not self.kv_caches[rank].grow(request.block_table):
            if self.kv_caches[rank].has_pending_frees:
                return False
            latest = next(
                each for each in reversed(self.by_id.values()) if each.data_rank == rank
            )
            self.preempt(latest)
            if latest is request:
                return False
        return True

    def update_room(self, step: StepBuilder, rank: int = 0) -> int:
        """Return the block table updates per group that a rank's step has room for."""
        assert step.program is not None, "the frame of a program has a size"
        groups, ranks = len(self.kv_caches[rank].pools), len(self.kv_caches)
        most = max_block_table_updates(
            step.program.share(ranks), groups=groups, block_size=self._block_size
        )
        updates = len(step.block_table_updates)
        if ranks > 1:
            slots = (update.slot for update in step.block_table_updates)
            updates = sum((slot - 1) % ranks == rank for slot in slots)
        return (most - updates) // groups

    def grow_ahead(
        self, step: StepBuilder, request: Request, stop: int, count: int
    ) -> int:
        """Grow a request's table for ``count`` tokens after ``stop``; returns how many
        fit into blocks that are free and the updates that the step's frame holds.
        """
        size, table = self._block_size, request.block_table
        kv_cache = self.kv_caches[request.data_rank]
        while request.sent_blocks * size < stop + count:
            has_room = self.update_room(step, request.data_rank) > 0
            has_block = request.sent_blocks < len(table[0])
            if not has_room or not (has_block or kv_cache.grow(table)):
                return request.sent_blocks * size - stop
            step.send_blocks(request, request.sent_blocks + 1)
        return count

    def preempt(self, request: Request) -> None:
        """Move a running request back to the front of the queue."""
        self.release(request)
        request.status = Status.WAITING
        self._waiting.push_front(request)
        self.preemptions += 1

    def release(self, request: Request) -> None:
        """Release the slot and blocks of a running request."""
        del self.by_id[request.id]
        rank = request.data_rank
        self.kv_caches[rank].release(request.block_table, request.last_step)
        self._releases.append(request.slot)
        self._slots[rank].append(request.slot)
        self._running[rank] -= 1
        request.slot = 0
        request.block_table = []

    def free_out_of_window(
        self,
        step: StepBuilder,
        request: Request,
        *,
        max_updates: int,
        position: int | None = None,
    ) -> None:
        """Free blocks that left their group's window, and update the block table.

        max_updates: updates per group that the step's frame has room for; further
        blocks are freed with the next step. position: of the first query that follows;
        by default that of the next token to be scheduled.
        """
        if not self.has_windows:
            return
        kv_cache = self.kv_caches[request.data_rank]
        prefix_cache = self.prefix_caches[request.data_rank]
        freed: list[list[int]] = []
        for group, blocks in enumerate(request.block_table):
            first = request.freed_window_blocks[group]
            least = request.scheduled - request.uncertain
            least = least if position is None else position
            stop = kv_cache.before_window(group, least)
            if prefix_cache is not None and prefix_cache.serves(request):
                # A block that is freed before it is published cannot be shared.
                stop = min(stop, request.published_blocks)
            stop = max(min(stop, first + max_updates), first)
            freed.append(blocks[first:stop])
            for index in range(first, stop):
                blocks[index] = 0
                update = BlockTableUpdate(group, request.slot, index, 0)
                step.block_table_updates.append(update)
            request.freed_window_blocks[group] = stop
        kv_cache.release(freed, request.last_step)
