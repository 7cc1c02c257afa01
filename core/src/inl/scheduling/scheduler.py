"""Who runs in the next step: integers, lists and dicts, and no tensor.

Requests run in order of arrival, so those that run all arrived before those that wait.
Each step takes one token of every decoding request, then chunks of prompts, then new
requests, until its token budget or its rows are used up. Since no more requests run
than a step has rows, each decoding one gets its token in every step: a long prompt does
not hold it up, and requests behind a long prompt do not overtake it.

Steps are planned ahead of the tokens that they feed on. Nothing but collected tokens is
counted, published to the prefix cache or freed (see :mod:`inl.scheduling.kv_cache_manager`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from inl.errors import RequestError, RunnerError
from inl.protocol.runner import Limits
from inl.scheduling import block_hash as prefix
from inl.scheduling.block_pool import BlockPool
from inl.scheduling.buckets import Buckets
from inl.scheduling.kv_cache_manager import KVCacheManager
from inl.scheduling.plan import Plan, SchedulerConfig, StepBuilder
from inl.scheduling.request import Event, Reason, Request, Status, check, make_event
from inl.scheduling.sampling_params import TokenLogprob, rank
from inl.scheduling.waiting_queue import WaitingQueue
from inl.spec.message import FEEDBACK, BlockTableUpdate, Row


class Scheduler:
    """Plans steps and takes in what they chose; the only one to change a request."""

    def __init__(
        self,
        limits: Limits,
        config: SchedulerConfig | None = None,
        *,
        kv_cache: KVCacheManager | None = None,
    ) -> None:
        self.config = config or SchedulerConfig()
        self._reset(limits, kv_cache)
        self.context = min(limits.max_tokens, self.config.context or limits.max_tokens)
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}
        """By id, in order of arrival."""
        self.in_flight: deque[Plan] = deque()
        self.arrivals = 0
        """Requests added, so the newest id."""
        self.preemptions = 0
        """Times that a request lost its blocks to an earlier one."""
        self.prefix_hit_tokens = 0
        """Tokens that admissions took from the prefix cache."""
        self._prefix_caching = self.config.prefix_cache and self.config.use_kv_cache
        self._steps = 0

    def _reset(self, limits: Limits, kv_cache: KVCacheManager | None = None) -> None:
        self.limits = limits
        self.kv_cache = kv_cache or KVCacheManager(
            [BlockPool(blocks, limits.block_size) for blocks in limits.blocks],
            limits.windows,
        )
        self.buckets = Buckets(
            limits,
            token_budget=self.config.token_budget,
            max_rows=min(self.config.max_rows or limits.slots, limits.slots - 1),
        )
        windowed = any(window is not None for window in self.kv_cache.windows)
        self._has_windows = windowed and self.config.use_kv_cache
        self._slots = list(range(limits.slots - 1, 0, -1))
        self._releases: list[int] = []

    def restart(self, limits: Limits) -> None:
        """Start over on a fresh runner: all who ran wait for it, by their token ids.

        Raises :class:`~inl.errors.RunnerError` where it cannot hold what the lost one
        could, or lacks the programs that they need; then nothing has changed.
        """
        live = [*self.running.values(), *self.waiting]
        needed = max((request.sampler for request in live), key=rank, default="greedy")
        has = Buckets(limits, token_budget=1, max_rows=1).sampler
        if (
            limits.vocab != self.limits.vocab
            or limits.max_tokens < self.context
            or rank(has) < rank(needed)
        ):
            raise RunnerError(
                f"runner: found a fresh one of {limits.vocab} token ids, "
                f"{limits.max_tokens} tokens of context and {has} programs, needs "
                f"{self.limits.vocab}, {self.context} and {needed} ones"
            )
        for plan in self.in_flight:
            for chunk in plan.chunks:
                chunk.request.in_flight -= 1
        self.in_flight.clear()
        for request in reversed(self.running.values()):
            request.status, request.slot, request.table = Status.WAITING, 0, []
            self.waiting.push_back(request)
        self.running.clear()
        for request in self.waiting:
            # They begin with the size of a block, which may be another one now.
            request.keys = []
        self._reset(limits)

    @property
    def has_releases(self) -> bool:
        """Whether the runner has still to be told of slots that are taken back."""
        return bool(self._releases)

    def check(self, request: Request) -> None:
        """Raise as :meth:`add` does for what could never be served."""
        check(request, self.limits.vocab, self.context, sampler=self.buckets.sampler)

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises :class:`~inl.errors.PromptTooLong` where it could never fit, and
        :class:`~inl.errors.RequestError` for what this runner does not serve.
        """
        if request.id:
            raise RequestError(f"request {request.id}: was added before; make another")
        self.check(request)
        self.arrivals += 1
        request.id = self.arrivals
        eos = frozenset[int]() if request.ignore_eos else self.config.eos_ids
        request.stops = request.stop_ids | eos
        request.limit = min(request.prompt_tokens + request.max_tokens, self.context)
        self.waiting.push(request)
        return request.id

    def finish(self, request: Request, reason: Reason) -> Event:
        """End a live request now; what it has in flight is thrown away."""
        assert request.status is not Status.FINISHED, "a request ends once"
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self.waiting.forget()
        request.status = Status.FINISHED
        return Event(request.id, None, reason)

    def plan(self) -> Plan:
        """Decide the next step and count it as submitted.

        Where there is nothing to compute, the plan has no chunks and is not a step.
        """
        draft = StepBuilder(self._steps + 1, self.buckets.tokens)
        self._decode(draft)
        self._prefill(draft)
        self._admit_waiting(draft)
        releases, self._releases = self._releases, []
        plan = draft.build(releases, self.buckets)
        if plan.chunks:
            self._steps = plan.step
            self.in_flight.append(plan)
        return plan

    def _decode(self, draft: StepBuilder) -> None:
        """Schedule a token of each decoding request, and remember the others."""
        size, running, passes = (
            self.limits.block_size,
            Status.RUNNING,
            self._has_windows,
        )
        for request in list(self.running.values()):
            start = request.scheduled
            if start < request.prefill_len:
                draft.prompts.append(request)
            elif start < request.max_scheduled and request.status is running:
                if not start % size and start == len(request.table[0]) * size:
                    if not self._grow(request):
                        continue
                    draft.update_block_table(request, start // size)
                if passes:
                    self._free_out_of_window(
                        draft, request, cells=start % size != 0 or size == 1
                    )
                draft.decode(request)
        draft.decode_rows = len(draft.chunks)

    def _prefill(self, draft: StepBuilder) -> None:
        """Schedule admitted prompts; uncached, they start over for each token."""
        uncached = not self.config.use_kv_cache
        for request in draft.prompts:
            if not draft.budget:
                return
            if request.status is not Status.RUNNING or (uncached and request.in_flight):
                continue
            if request.scheduled == 0:
                if not self._allocate_prompt(request):
                    continue
                draft.admit(request)
            count = min(request.prefill_len - request.scheduled, draft.budget)
            self._free_out_of_window(
                draft, request, cells=1 + count // self.limits.block_size
            )
            draft.schedule(request, request.prefill_len)

    def _free_out_of_window(
        self, draft: StepBuilder, request: Request, *, cells: int
    ) -> None:
        """Give back blocks that no query sees any more, and tell the runner.

        ``cells`` are those that a step's message has left for each group of this row;
        what is more waits for the next step.
        """
        if not self._has_windows:
            return
        gone: list[list[int]] = []
        for group, blocks in enumerate(request.table):
            first = request.freed_window_blocks[group]
            stop = self.kv_cache.before_window(group, request.scheduled)
            if (
                self._prefix_caching
            ):  # nobody could share a block that was never published
                stop = min(stop, request.published)
            stop = max(min(stop, first + cells), first)
            gone.append(blocks[first:stop])
            for index in range(first, stop):
                blocks[index] = 0
                draft.cells.append(BlockTableUpdate(group, request.slot, index, 0))
            request.freed_window_blocks[group] = stop
        self.kv_cache.release(gone, request.last_step)

    def _allocate_prompt(self, request: Request) -> bool:
        """Give a request blocks for all the tokens that it starts over with."""
        while len(request.table[0]) * self.limits.block_size < request.prefill_len:
            if not self._grow(request):
                return False
        return True

    def _grow(self, request: Request) -> bool:
        """Give a request one more block, at the cost of the latest arrived."""
        while not self.kv_cache.grow(request.table):
            if self.kv_cache.has_pending_frees:
                return False
            latest = next(reversed(self.running.values()))
            self._preempt(latest)
            if latest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = Status.WAITING
        self.waiting.push_back(request)
        self.preemptions += 1

    def _release(self, request: Request) -> None:
        del self.running[request.id]
        self.kv_cache.release(request.table, request.last_step)
        self._releases.append(request.slot)
        self._slots.append(request.slot)
        request.slot = 0
        request.table = []

    def _admit_waiting(self, draft: StepBuilder) -> None:
        """Let in those who wait, as long as there is room."""
        growing: int | None = None
        while (
            draft.budget
            and len(self.running) < self.buckets.rows
            and (request := self.waiting.head()) is not None
            # Until its steps are collected, a preempted request's ids are not known.
            and not request.in_flight
        ):
            if growing is None:
                growing = sum(map(self._needs_more_blocks, self.running.values()))
            if not self._try_admit(request, growing):
                return
            growing += self._needs_more_blocks(request)
            draft.admit(request)
            draft.schedule(request, request.prefill_len)

    def _needs_more_blocks(self, request: Request) -> bool:
        """Whether a request will need a block more than it holds."""
        return len(request.table[0]) * self.limits.block_size < request.limit - 1

    def _try_admit(self, request: Request, growing: int) -> bool:
        """Give a request its slot and blocks beside ``growing`` others that grow."""
        size = self.limits.block_size
        ids = len(request.tokens)
        fed = self._prefill_len(request)
        # The last token is always computed: its hidden state chooses the next one.
        keys = self._keys(request, (fed - 1) // size) if self._prefix_caching else []
        # Without a block spared for each that still grows they would preempt this one.
        found = self.kv_cache.admit(keys, -(-ids // size), spare=growing)
        if found is None:
            return False
        request.table, request.published = found
        request.freed_window_blocks = [blocks.count(0) for blocks in request.table]
        request.cached_tokens = request.scheduled = request.published * size
        request.prefill_len, request.host_token_count = fed, ids
        request.max_scheduled = request.limit - 1 if self.config.use_kv_cache else ids
        request.slot = self._slots.pop()
        request.feedback = Row(request.slot, FEEDBACK)
        request.status = Status.RUNNING
        self.prefix_hit_tokens += request.cached_tokens
        self.running[self.waiting.pop().id] = request
        return True

    def _prefill_len(self, request: Request) -> int:
        """Tokens to compute in chunks; an answer's own are not where it is replayed."""
        known = len(request.tokens)
        return request.prompt_tokens if self.config.replay else known

    def _keys(self, request: Request, count: int) -> list[bytes]:
        size = self.limits.block_size
        if not request.keys:
            request.keys = [
                prefix.root(
                    model=self.config.model,
                    adapter=request.adapter,
                    salt=request.salt,
                    block_size=size,
                )
            ]
        prefix.extend(request.keys, request.tokens, size, count)
        return request.keys[1 : count + 1]

    def process_outputs(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprob] = ()
    ) -> list[Event]:
        """Take in what the oldest step in flight chose, one token for each chunk.

        scores: one for each chunk too, where the step's program tells them.
        """
        plan = self.in_flight.popleft()
        self.kv_cache.complete_step(plan.step)
        size, publishes = self.limits.block_size, self._prefix_caching
        finished, running = Status.FINISHED, Status.RUNNING
        events: list[Event] = []
        for row, (chunk, token) in enumerate(zip(plan.chunks, tokens, strict=True)):
            request, _, stop = chunk
            request.in_flight -= 1
            status = request.status
            if status is finished:
                continue
            if publishes and stop // size > request.published and status is running:
                self._publish(request, stop)
            # A chunk that ends before the last known token chose nothing of use.
            if stop == len(request.tokens):
                if request.logprobs is not None:
                    found = scores[row]
                    request.scores.append(
                        found._replace(top=found.top[: request.logprobs])
                    )
                events.append(self._append(request, token))
        return events

    def _publish(self, request: Request, stop: int) -> None:
        if self.config.replay:
            stop = min(stop, request.prompt_tokens)
        full = stop // self.limits.block_size
        if full > request.published:
            keys = self._keys(request, full)
            for index in range(request.published, full):
                self.kv_cache.publish(request.table, index, keys[index])
            request.published = full

    def _append(self, request: Request, token: int) -> Event:
        request.tokens.append(token)
        if token in request.stops:
            return self.finish(request, "stop")._replace(token=token)
        if len(request.tokens) == request.limit:
            return self.finish(request, "length")._replace(token=token)
        if not self.config.use_kv_cache and request.status is Status.RUNNING:
            request.scheduled = 0
            request.prefill_len = self._prefill_len(request)
            request.host_token_count = request.max_scheduled = len(request.tokens)
        return make_event((request.id, token, None, None))
