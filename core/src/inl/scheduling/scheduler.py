"""Scheduler for continuous batching with chunked prefill, in plain integers.

Requests run in order of arrival, short prompts before long ones that came a little
earlier, see :mod:`inl.scheduling.waiting_queue`. Each step takes one token of every
decoding request, then chunks of prompts and new requests, until its token budget or its
rows are used up. No more requests run than a step has rows, so each decoding request
gets its token in every step, which is short where any decodes, see
:mod:`inl.scheduling.mixed_steps`: a long prompt delays neither it nor short prompts.

Steps are planned before the tokens that they feed back are known. Only collected tokens
are counted, published to the prefix cache or freed, see
:mod:`inl.kv.kv_cache_manager`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from math import isnan
from typing import TYPE_CHECKING

from inl.errors import NonFiniteLogits, RequestError, RunnerError
from inl.kv.kv_cache_manager import KVCacheManager
from inl.protocol.runner import Limits
from inl.protocol.token_masks import mask_words
from inl.scheduling.buckets import Buckets
from inl.scheduling.deadlines import Deadlines
from inl.scheduling.guided_output import append_guided, skips_forced
from inl.scheduling.lanes import in_lane, prompt_tokens
from inl.scheduling.mixed_steps import MixedSteps
from inl.scheduling.plan import Chunk, Plan, SchedulerConfig, StepBuilder
from inl.scheduling.repeats import Repeats
from inl.scheduling.request import (
    Event,
    FinishReason,
    Request,
    Status,
    StepKind,
    make_event,
)
from inl.scheduling.request_check import (
    check_adapter,
    check_embeddings,
    check_request,
    check_room,
    check_spans,
)
from inl.scheduling.request_order import check_deadline
from inl.scheduling.running_requests import RunningRequests
from inl.scheduling.sample_groups import SampleGroups
from inl.scheduling.sampling_params import TokenLogprob, rank
from inl.scheduling.waiting_queue import WaitingQueue
from inl.spec.step import INVALID_TOKEN

if TYPE_CHECKING:
    from inl.kv.kv_events import OnKVEvent
    from inl.kv.snapshots import SnapshotIndex
    from inl.kv.tier import Tier
    from inl.scheduling.draft_planner import DraftPlanner


class Scheduler:
    """Plans steps and processes their outputs; the only one to change a request."""

    def __init__(
        self,
        limits: Limits,
        config: SchedulerConfig | None = None,
        *,
        kv_cache: KVCacheManager | None = None,
        speculation: DraftPlanner | None = None,
        tier: Tier | None = None,
        snapshots: SnapshotIndex | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.speculation = speculation
        """Plans drafts; ``None`` decodes one token per step."""
        self.config = config or SchedulerConfig()
        self.repeats = Repeats(self.config)
        """Decides how many decoding steps the runner computes in one step."""
        self.mixed = MixedSteps(self.config)
        """Bounds steps with prompts beside decoding rows."""
        self.waiting = WaitingQueue()
        self._groups = SampleGroups(self.waiting)
        self._deadlines = Deadlines(clock)
        self._requests = RunningRequests(
            self.config, self.waiting, limits, kv_cache, tier, snapshots
        )
        self._set_limits(limits)
        self.context = min(limits.max_tokens, self.config.context or limits.max_tokens)
        self.in_flight: deque[Plan] = deque()
        """Steps planned and not collected, oldest first."""
        self.live: dict[int, Request] = {}
        """Requests that have not finished by id, in order of arrival."""
        self.adapters: dict[int, str] = {}
        """Digest of each adapter that the runner has loaded, by number."""
        self.arrivals = 0
        """Number of requests added, which is the newest id."""
        self._steps = 0
        self._unsampled: Counter[StepKind] = Counter()
        """Live requests with steps of other kinds than SAMPLED."""
        self._last_kind = StepKind.SAMPLED
        """Kind of the last step."""
        self._is_read = False
        """Whether the hidden states of the last step are read."""

    def _set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.buckets = Buckets(
            limits,
            token_budget=self.config.token_budget,
            max_rows=min(self.config.max_rows or limits.slots, limits.slots - 1),
        )

    @property
    def running(self) -> dict[int, Request]:
        """Requests with a slot by id, in order of arrival."""
        return self._requests.by_id

    @property
    def kv_cache(self) -> KVCacheManager:
        """Block tables of the running requests; of the first of several ranks."""
        return self._requests.kv_caches[0]

    @property
    def kv_caches(self) -> Sequence[KVCacheManager]:
        """Block tables of the running requests of each rank that divides the rows."""
        return self._requests.kv_caches

    @property
    def preemptions(self) -> int:
        """Times that a request lost its blocks to an earlier one."""
        return self._requests.preemptions

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens that admissions took from the prefix cache."""
        return self._requests.prefix_hit_tokens

    def block_keys(self, request: Request) -> list[bytes]:
        """Return the prefix-cache keys of all full blocks of a request's tokens.

        Empty for one that shares no blocks.
        """
        cache = self._requests.prefix_caches[0]
        count = len(request.tokens) // self.limits.block_size
        return [] if cache is None else cache.keys(request, count)

    @property
    def must_collect(self) -> bool:
        """Whether the step in flight is collected before another one is planned."""
        return self._is_read and bool(self.in_flight)

    @property
    def has_releases(self) -> bool:
        """Whether the next plan has slots to release."""
        return self._requests.has_releases

    def restart(self, limits: Limits) -> list[Event]:
        """Start over without steps in flight, slots and blocks; every request waits.

        For a new runner, or one that was reset; the requests continue from their
        collected tokens. An exception may have interrupted any other method at any
        instruction; returns the last events of the requests whose end it interrupted,
        and of those whose adapter the new runner does not have.

        Raises :class:`~inl.errors.RunnerError`, and changes nothing, if the runner
        cannot hold what the last one could, or lacks a sampler that a request needs.
        """
        self._check_limits(limits)
        self.in_flight.clear()
        self.waiting.clear()
        self._groups.clear()
        self._requests.reset(limits)
        self._set_limits(limits)
        ended: list[Event] = []
        for number, request in list(self.live.items()):
            if not request.id:
                del self.live[number]  # its addition was interrupted
        self._unsampled = Counter(
            kind
            for request in self.live.values()
            if (kind := request.unsampled_kind) is not None
        )
        for request in list(self.live.values()):
            request.restart()
            self.waiting.push(request, request.id)
            if reason := request.finish_reason or request.end_reason:
                ended.append(self.finish(request, reason, request.error))
                continue
            try:
                check_adapter(request, self.adapters)
            except RequestError as error:
                ended.append(self.finish(request, "error", error))
        return ended

    def _check_limits(self, limits: Limits) -> None:
        samplers = (request.sampler for request in self.live.values())
        needed = max(samplers, key=rank, default="greedy")
        available = Buckets(limits, token_budget=1, max_rows=1).sampler
        if (
            limits.vocab != self.limits.vocab
            or limits.max_tokens < self.context
            or rank(available) < rank(needed)
        ):
            raise RunnerError(
                f"runner: the new one has a vocabulary of {limits.vocab}, a context "
                f'of {limits.max_tokens} tokens and sampling="{available}"; needs '
                f'{self.limits.vocab}, {self.context} and "{needed}"'
            )

    def check(self, request: Request) -> None:
        """Raise as :meth:`add` does for a request that can never be served."""
        check_request(
            request, self.limits.vocab, self.context, sampler=self.buckets.sampler,
            use_kv_cache=self.config.use_kv_cache,
        )  # fmt: skip
        check_adapter(request, self.adapters)
        check_embeddings(request, self.limits.embedding)
        check_spans(request, self.buckets.tokens, self.buckets.rows)
        check_deadline(request.deadline, self._deadlines.clock())

    def report_kv_events(self, on_event: OnKVEvent) -> None:
        """Call ``on_event`` with what happens to shared blocks of the KV cache."""
        self._requests.report_kv_events(on_event)

    def check_room(self, request: Request) -> None:
        """Raise :class:`~inl.errors.QueueFull` if too much waits for ``request``."""
        check_room(self.waiting, request.prompt_tokens, self.config)

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises :class:`~inl.errors.PromptTooLong` if it does not fit the context,
        :class:`~inl.errors.QueueFull` if too much waits, and
        :class:`~inl.errors.RequestError` for what this runner does not serve.
        """
        if request.id:
            raise RequestError(
                f"request {request.id}: was added before; create another Request"
            )
        self.check(request)
        self.check_room(request)
        eos = frozenset[int]() if request.ignore_eos else self.config.eos_ids
        request.end_ids = request.stop_ids | eos
        max_length = request.prompt_tokens + request.max_tokens
        request.max_length = min(max_length, self.context + request.pooled)
        if request.allowed_token_ids is not None:
            request.token_mask = mask_words(
                tuple(request.allowed_token_ids), self.limits.vocab
            )
        request.may_need_masks = (
            request.token_mask is not None or request.guide is not None
        )
        self.arrivals += 1
        if (kind := request.unsampled_kind) is not None:
            self._unsampled[kind] += 1
        self.live[self.arrivals] = request
        if not self._groups.hold(request):
            self.waiting.push(request, self.arrivals)
        self._deadlines.add(request, self.arrivals)
        # Assigned last: marks the request as completely added.
        request.id = self.arrivals
        return request.id

    def finish(
        self, request: Request, reason: FinishReason, error: Exception | None = None
    ) -> Event:
        """End a live request now; tokens of its steps in flight are discarded."""
        assert request.status is not Status.FINISHED, "a request finishes once"
        request.finish_reason, request.error = reason, error
        if request.status is Status.RUNNING:
            self._requests.release(request)
        else:
            self.waiting.discard(request)
        request.status = Status.FINISHED
        del self.live[request.id]
        if (kind := request.unsampled_kind) is not None:
            self._unsampled[kind] -= 1
        if self.speculation is not None:
            self.speculation.forget(request)
        self._groups.finish(request)
        return Event(request.id, None, reason, error)

    def expire(self) -> list[Event]:
        """End the requests whose deadline has passed; returns their last events."""
        requests = map(self.live.get, self._deadlines.expired())
        return [self.finish(each, "deadline") for each in requests if each is not None]

    def preempt(self, request: Request) -> None:
        """Move a running request back to the front of the queue."""
        self._requests.preempt(request)

    def plan(self) -> Plan:
        """Plan the next step and count it as submitted.

        If there is nothing to compute, the plan has no chunks and is not a step.
        """
        step = self._add_rows()
        if self.speculation is not None and 0 < len(step.chunks) == step.decode_rows:
            self.speculation.extend(step, self._requests, self.buckets)
        elif 0 < len(step.chunks) == step.decode_rows and not step.prefilling:
            waiting = bool(self.waiting)
            if not waiting or len(self.running) >= self.buckets.rows:
                self.repeats.extend(step, self._requests, self.buckets, waiting=waiting)
        stores, loads = self.kv_cache.take_moves()
        snapshots = self._requests.take_snapshots(step)
        plan = step.build(
            self._requests.take_releases(), self.buckets, stores, loads,
            self._requests.take_restores(), snapshots,
        )  # fmt: skip
        if self.speculation is not None:
            requests = len(self.running) + len(self.waiting)
            self._is_read = self.speculation.planned(plan, requests, self.buckets)
        if plan.chunks:
            self._steps = plan.step
            self.repeats.planned(is_first=not self.in_flight)
            self.mixed.planned(is_first=not self.in_flight)
            self.in_flight.append(plan)
            shares = self.waiting.shares
            for request, start, stop, _ in plan.chunks if len(shares) > 1 else ():
                shares.charge(request.key, stop - start)
        return plan

    def _add_rows(self) -> StepBuilder:
        """Return a step with rows of one kind.

        Kinds take turns where several have something to compute.
        """
        for kind in self._kinds():
            step = StepBuilder(
                self._steps + 1, self.buckets.tokens, kind, self.buckets.ranks
            )
            self._decode(step)
            if not step.has_uncertain_rows:
                self._limit(step)
                self._prefill(step)
                self._admit_waiting(step)
            if step.chunks:
                break
        self._last_kind = step.kind
        return step

    def _kinds(self) -> Sequence[StepKind]:
        """Return the kinds of step that live requests may need, the last one last."""
        if not self._unsampled.total():
            return (StepKind.SAMPLED,)
        kinds = list(StepKind)
        after = kinds.index(self._last_kind) + 1
        return [
            kind
            for kind in (*kinds[after:], *kinds[:after])
            if kind is StepKind.SAMPLED or self._unsampled[kind]
        ]

    def _decode(self, step: StepBuilder) -> None:
        """Add a token of each decoding request; collect those still in prefill."""
        requests, size, running = (
            self._requests,
            self.limits.block_size,
            Status.RUNNING,
        )
        kind, is_sampled = step.kind, step.kind is StepKind.SAMPLED
        candidates = list(requests.by_id.values())
        if self.limits.stages > 1:
            candidates = in_lane(step.step, candidates, self.limits.stages)
        for request in candidates:
            start = request.scheduled
            if start < request.prefill_len:
                if request.step_kind(start) is not kind:
                    continue
                # Only forced tokens need more blocks than an admission allocates.
                if not start or (
                    request.status is running
                    and requests.allocate(request, request.prefill_len)
                ):
                    step.prefilling.append(request)
            elif not is_sampled:
                continue
            elif start < request.max_scheduled and request.status is running:
                if request.uncertain and (
                    request.temperature or request.guide is not None
                ):
                    if self._must_wait(request):
                        continue
                    step.has_uncertain_rows = True
                if not start % size and start == request.sent_blocks * size:
                    if not requests.allocate(request, start + 1):
                        continue
                    step.send_blocks(request, start // size + 1)
                if requests.has_windows:
                    room = start % size != 0 or size == 1
                    requests.free_out_of_window(step, request, max_updates=int(room))
                step.decode(request)
        step.decode_rows = len(step.chunks)

    def _must_wait(self, request: Request) -> bool:
        assert self.speculation is not None, "only drafts make positions uncertain"
        running = self.running
        prompts = (self.waiting and len(running) < self.buckets.rows) or any(
            each.scheduled < each.prefill_len for each in running.values()
        )
        return self.speculation.must_wait(request, prompts=bool(prompts))

    def _limit(self, step: StepBuilder) -> None:
        """Limit a step with prompts, for what decodes beside them and for padding."""
        if not self.config.use_kv_cache or not (step.prefilling or self.waiting):
            return
        rows, most = step.decode_rows, step.max_tokens
        left = sum(each.prefill_len - each.scheduled for each in step.prefilling)
        left += self.waiting.tokens
        if rows:
            padded = self.buckets.padded(step.chunks)[1]
            most = min(most, self.mixed.tokens(padded, left))
        if self.limits.stages > 1:
            most = min(most, rows + prompt_tokens(left, self.limits.stages))
        longest = max((each.longest_span for each in self._prompts(step)), default=0)
        if self.buckets.ranks == 1:
            most = self.buckets.fill(rows + left, rows, most)
        step.limit(most, longest)

    def _prompts(self, step: StepBuilder) -> list[Request]:
        """Requests whose prompt the step may compute: running ones, and the next."""
        head = self.waiting.head()
        return step.prefilling if head is None else [*step.prefilling, head]

    def _prefill(self, step: StepBuilder) -> None:
        """Add chunks of running requests; without a cache, the whole sequence."""
        requests, uncached = self._requests, not self.config.use_kv_cache
        # One that starts again may preempt the latest: no row of this step yet.
        may_overtake = all(each.scheduled for each in step.prefilling)
        if may_overtake:
            step.prefilling.sort(key=_order)
        for request in step.prefilling:
            if may_overtake:
                self._admit_waiting(step, before=request.order)
            if not any(step.budgets):
                return
            if not step.room(request):
                continue
            if request.status is not Status.RUNNING or (uncached and request.in_flight):
                continue
            last = requests.chunk_stop(request, step.room(request))
            if last == request.scheduled:
                continue  # a step with more room computes its span
            if request.scheduled == 0:
                if not requests.allocate(request, request.prefill_len):
                    continue
                step.admit(request)
            count = last - request.scheduled
            size = self.limits.block_size
            new = step.send_blocks(request, -(-(request.scheduled + count) // size))
            room = 1 + count // size - new
            requests.free_out_of_window(step, request, max_updates=room)
            requests.schedule(step, request, last)

    def _admit_waiting(self, step: StepBuilder, before: int | None = None) -> None:
        """Admit waiting requests while budget, rows and blocks last.

        before: ``Request.order`` of a running request, whose prompt they precede.
        """
        requests = self._requests
        growing: list[int] | None = None
        while (
            any(step.budgets)
            and len(requests.by_id) < self.buckets.rows
            and (request := self.waiting.head()) is not None
            # The ids of a preempted request are known once its steps are collected.
            and not request.in_flight
            # A preempted one starts again, and no prefix has all tokens of this kind.
            and request.step_kind(0) is step.kind
            and (before is None or request.order <= before)
        ):
            if growing is None:
                growing = requests.count_growing()
            least = max(request.longest_span, 1)
            ranks = requests.open_ranks(
                request, step.budgets, least, self.buckets.rank_rows
            )
            if not any(
                requests.try_admit(request, growing[rank], rank) for rank in ranks
            ):
                return
            growing[request.data_rank] += requests.needs_more_blocks(request)
            step.admit(request)
            last = requests.chunk_stop(request, step.room(request))
            requests.schedule(step, request, last)

    def process_outputs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        *,
        prompt_logprobs: Sequence[Sequence[TokenLogprob]] = (),
    ) -> list[Event]:
        """Apply the output of the oldest step in flight: one token per chunk.

        A request whose token is ``INVALID_TOKEN`` ends with
        :class:`~inl.errors.NonFiniteLogits`. logprobs: one per chunk too, if a request
        of the step asks for them. Tokens of pooled requests are not read.
        prompt_logprobs: of a scored step, of the token after each one of a chunk.
        """
        plan = self._complete_step()
        self.repeats.collected(plan)
        size, prefix_caches = self.limits.block_size, self._requests.prefix_caches
        finished, running = Status.FINISHED, Status.RUNNING
        events: list[Event] = []
        for row, (chunk, token) in enumerate(zip(plan.chunks, tokens, strict=True)):
            request, _, stop, _ = chunk
            request.in_flight -= 1
            if request.status is finished:
                continue
            if prompt_logprobs and (
                ended := self._add_prompt_logprobs(chunk, prompt_logprobs[row])
            ):
                events.append(ended)
                continue
            # Rejected drafts of the step before shift a row back.
            stop = min(stop, len(request.tokens))
            if (
                (prefix_cache := prefix_caches[request.data_rank]) is not None
                and stop // size > request.published_blocks
                and request.status is running
                and token != INVALID_TOKEN
            ):
                prefix_cache.publish(request, stop)
            if request.sample_group and stop >= request.prompt_tokens:
                self._groups.release(request)
            if (
                prompt_logprobs
                and request.ends_scored
                and stop == len(request.tokens) - 1
            ):
                events.append(self.finish(request, "length"))
                continue
            # The token of a chunk that ends before the last known token is unused.
            if stop == len(request.tokens):
                if request.pooled:
                    events.append(self.finish(request, "stop"))
                    continue
                if request.logprobs is not None:
                    self._add_logprobs(request, token, logprobs[row])
                is_exact = not request.in_flight or not request.uncertain
                events += self._append_output(request, token, skips=is_exact)
        if self.speculation is not None:
            self.speculation.processed(plan.chunks)
        return events

    def _append_output(
        self, request: Request, token: int, *, skips: bool
    ) -> list[Event]:
        """Append a sampled token, and with ``skips`` those that a grammar forces."""
        if request.guide is None:
            return [self._append(request, token)]
        in_order = self.config.replay or self.config.recurrent
        skips = skips and skips_forced(request) and not in_order
        return append_guided(
            request, request.guide, token, append=self._append, finish=self.finish,
            skips=skips,
        )  # fmt: skip

    def process_several(
        self,
        accepted: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[TokenLogprob]] = (),
    ) -> list[Event]:
        """Apply the output of the oldest step in flight, with any tokens per row.

        accepted: the tokens of each row: at least one of a step that has verified
        drafts, those up to its end of a repeated one. logprobs: of each of them, if a
        request of the step asks for them. Otherwise as :meth:`process_outputs`.
        """
        plan = self._complete_step()
        self.repeats.collected(plan, max(map(len, accepted)))
        events: list[Event] = []
        for row, (chunk, ids) in enumerate(zip(plan.chunks, accepted, strict=True)):
            request = chunk.request
            request.in_flight -= 1
            if request.status is Status.FINISHED:
                continue
            if self.speculation is not None and chunk.drafts is not None:
                self.speculation.collected(chunk, len(ids))
            if chunk.stop < len(request.tokens):
                continue  # a grammar has forced the token meanwhile
            for place, token in enumerate(ids):
                self._publish(request, token)
                if request.logprobs is not None:
                    self._add_logprobs(request, token, logprobs[row][place])
                # Positions of steps in flight may be too high, by rejected drafts.
                is_exact = place == len(ids) - 1 and not request.in_flight
                events += self._append_output(request, token, skips=is_exact)
                if events[-1].finish_reason is not None:
                    break
        if self.speculation is not None:
            self.speculation.processed(plan.chunks)
        return events

    def _complete_step(self) -> Plan:
        plan = self.in_flight.popleft()
        self.mixed.collected(plan)
        self._requests.complete_step(plan.step)
        return plan

    def _publish(self, request: Request, token: int) -> None:
        """Publish the blocks of all tokens so far, which ``token`` depends on."""
        prefix_cache = self._requests.prefix_caches[request.data_rank]
        running = request.status is Status.RUNNING
        if prefix_cache is not None and running and token != INVALID_TOKEN:
            prefix_cache.publish(request, len(request.tokens))

    def _add_logprobs(self, request: Request, token: int, scores: TokenLogprob) -> None:
        if token != INVALID_TOKEN:
            top = scores.top[: request.logprobs]
            request.token_logprobs.append(scores._replace(top=top))

    def _add_prompt_logprobs(
        self, chunk: Chunk, scores: Sequence[TokenLogprob]
    ) -> Event | None:
        """Add what a request lacks: a restarted one has some; returns its last event.

        The event of a request that ends because its logits are not finite.
        """
        request, most = chunk.request, chunk.request.prompt_logprobs
        known = request.prompt_token_logprobs
        new = scores[max(len(known) - chunk.start - 1, 0) :]
        finite = list(takewhile(_is_finite, new))
        if finite and len(finite[0].top) != most:  # another request asks for more
            finite = [each._replace(top=each.top[:most]) for each in finite]
        known += finite
        if len(finite) < len(new):
            return self.finish(request, "error", _non_finite(request))
        return None

    def _append(self, request: Request, token: int) -> Event:
        if token == INVALID_TOKEN:
            return self.finish(request, "error", _non_finite(request))
        tokens = request.tokens
        tokens.append(token)
        # Checked here first: a property costs more than both comparisons.
        if (token in request.end_ids or len(tokens) >= request.max_length) and (
            reason := request.end_reason
        ):
            return self.finish(request, reason)._replace(token=token)
        if not self.config.use_kv_cache and request.status is Status.RUNNING:
            request.scheduled = 0
            request.prefill_len = self._requests.prefill_len(request)
            request.host_token_count = request.max_scheduled = len(tokens)
        return make_event((request.id, token, None, None))


def _order(request: Request) -> int:
    return request.order


def _is_finite(scores: TokenLogprob) -> bool:
    return not isnan(scores.logprob)


def _non_finite(request: Request) -> NonFiniteLogits:
    return NonFiniteLogits(
        f"request {request.id}: the logits after token {len(request.tokens)} (prompt "
        f"{request.prompt_tokens}) contain NaN or infinity; the compute dtype may "
        'overflow (try dtype="float32"), or the weights are damaged'
    )
