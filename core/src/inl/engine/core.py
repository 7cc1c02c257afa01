"""The engine core: plans steps, runs them on a runner, and returns events.

Works on token ids, and on frames and masks of int32; it knows neither text nor tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from inl.engine.block_copies import (
    BlockCopies,
    read_sequence,
    read_span,
    shared_runs,
    write_carried,
)
from inl.engine.embedder import keep_hidden
from inl.engine.expert_loads import ExpertLoads
from inl.engine.frame_encoder import frames, masked_rows
from inl.engine.records import Stats as Stats
from inl.engine.records import StepRecord as StepRecord
from inl.engine.reply_check import (
    read_accepted,
    read_accepted_logprobs,
    read_hidden,
    read_logprobs,
    read_prompt_logprobs,
    read_repeated,
    read_tokens,
)
from inl.engine.snapshot_copies import SnapshotCopies
from inl.engine.step_masks import StepMasks, are_ready
from inl.errors import (
    InlError,
    ModelError,
    OutOfMemory,
    RequestError,
    RunnerError,
    WorkerLost,
)
from inl.kv_transfer.carried import CarriedSpans
from inl.protocol.runner import AdapterSource, Limits, Reply, Runner
from inl.protocol.token_masks import mask_width
from inl.scheduling.plan import Plan, SchedulerConfig
from inl.scheduling.request import Event, FinishReason, Request, Status, StepKind
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import STEP, header
from inl.spec.step import NO_TOKEN, Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.kv_tiers.state_snapshots import StateSnapshots
    from inl.kv_tiers.tiers import BlockTiers
    from inl.kv_transfer.carried import CarriedState
    from inl.kv_transfer.spans import TokenSpan
    from inl.recording.recorder import Recorder
    from inl.spec.cache_layout import Parts
    from inl.spec.encoder import TokenSequence

    Blocks = Iterable[tuple[int, Parts]]

log = logging.getLogger("inl")


class EngineCore:
    """Serves requests on one runner. Not thread-safe.

    The caller closes the runner. If the runner is out of memory for a step, the
    requests of that step end with :class:`~inl.errors.OutOfMemory` and the others
    continue. If it raises another error for a step, the requests of that step end with
    this error, and the others start over from their token ids on the runner, which is
    reset. If it is a lost worker, or cannot be reset, ``replace`` may return a new
    runner, on which live requests start over; the former one is closed here. Without
    it, every live request ends with the error and the engine refuses further requests.

    After an exception such as KeyboardInterrupt has interrupted a call, whatever the
    instruction, the next call resets the runner and all live requests start over from
    their token ids. Events that the interrupted call did not return are lost; the
    requests have their tokens, ``finish_reason`` and ``error``. An exception of
    ``on_step`` interrupts nothing.

    on_step: called after each submitted step. recorder: records frames and replies.
    tiers: of the scheduler, store blocks that the device's pools evict. snapshots: of
    the scheduler, of a model with recurrent state.
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig | None = None,
        *,
        scheduler: Scheduler | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        recorder: Recorder | None = None,
        replace: Callable[[Exception], Runner] | None = None,
        tiers: BlockTiers | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler or Scheduler(
            runner.limits, config, tier=tiers, snapshots=snapshots
        )
        self._copies = None if tiers is None else BlockCopies(tiers, recorder)
        self._states = (
            None if snapshots is None else SnapshotCopies(snapshots, recorder)
        )
        self.restarts = 0
        """Runners that were replaced."""
        self.failed_steps = 0
        """Errors of the runner, those without memory for a step not included."""
        self._recorder = recorder
        self._replace = replace
        self._on_step = on_step
        self._pending: list[Event] = []
        """Events that the next step returns."""
        self.failure: Exception | None = None
        """Why the engine serves no more requests."""
        self._lost: Exception | None = None
        """Why the runner has to be replaced, until it is."""
        self._is_unsettled = False
        """Whether a call is changing the state, or was interrupted while it did."""
        self._discarded_steps: set[int] = set()
        """Planned steps that the runner has no memory for."""
        self._masks = StepMasks()
        self._unsampled: Plan | None = None
        """The newest step in flight, if its masks depend on an earlier one."""
        self._steps = self._tokens = self._rows = 0
        self.expert_loads = ExpertLoads()
        """Tokens of each expert in the steps that were counted, see
        :attr:`~inl.config.EngineConfig.expert_load_interval`."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything left to compute, to return or to reset."""
        if self.scheduler.live or self._pending or self._is_unsettled:
            return True
        idle = not self.scheduler.in_flight and not self.scheduler.has_releases
        return self.failure is None and not idle

    @property
    def awaits_masks(self) -> bool:
        """Whether the newest step in flight waits for its masks."""
        return self._unsampled is not None

    @property
    def running_requests(self) -> int:
        """Number of requests that have a slot."""
        return len(self.scheduler.running)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache blocks in use, 0 to 1: of the fullest pool."""
        caches = self.scheduler.kv_caches
        pools = [pool for cache in caches for pool in cache.pools]
        return max(pool.used_blocks / max(pool.blocks - 1, 1) for pool in pools)

    @property
    def live(self) -> Mapping[int, Request]:
        """Requests that have not finished by id, in order of arrival."""
        return self.scheduler.live

    @property
    def config(self) -> SchedulerConfig:
        """Settings of the scheduler, and what it knows of the model."""
        return self.scheduler.config

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and output."""
        return self.scheduler.context

    @property
    def stats(self) -> Stats:
        """Totals so far."""
        scheduler = self.scheduler
        return Stats(
            self._steps,
            self._tokens,
            self._rows,
            scheduler.preemptions,
            scheduler.prefix_hit_tokens,
            self._masks.seconds,
            self._masks.wait_seconds,
        )

    def check(self, request: Request) -> None:
        """Raise as :meth:`add` does for a request that can never be served."""
        self.scheduler.check(request)

    def check_room(self, request: Request) -> None:
        """Raise :class:`~inl.errors.QueueFull` if too much waits for ``request``."""
        self.scheduler.check_room(request)

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises :class:`~inl.errors.RequestError` if it cannot be served, and
        :class:`~inl.errors.RunnerError` after the runner has failed.
        """
        self._check_runner()
        self.settle()
        self._is_unsettled = True
        try:
            number = self.scheduler.add(request)
        except RequestError:
            self._is_unsettled = False  # raised before anything changes
            raise
        self._is_unsettled = False
        return number

    def load_adapter(self, source: AdapterSource) -> None:
        """Load an adapter at the runner, for requests that are added from now on.

        No live request has its number. Raises as
        :meth:`~inl.protocol.runner.Runner.load_adapter`; then the number has no
        adapter.
        """
        self._check_runner()
        self.settle()
        self._is_unsettled = True
        self.scheduler.adapters.pop(source.number, None)
        try:
            self.runner.load_adapter(source)
        except (ModelError, OutOfMemory):
            self._is_unsettled = False
            raise
        except Exception as error:
            self._fail(error)
            self._is_unsettled = False
            raise
        self.scheduler.adapters[source.number] = source.digest
        if self._recorder is not None:
            self._recorder.add(source)
        self._is_unsettled = False

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks that are free now.

        Requests that run keep their blocks, which no later request shares.
        """
        if self._copies is not None:
            self.settle()
            self._copies.tiers.clear()
        return sum(cache.forget() for cache in self.scheduler.kv_caches)

    def read_blocks(
        self,
        request: Request,
        first: Sequence[int] = (),
        most: int | None = None,
    ) -> list[TokenSpan]:
        """Read the full blocks of a request's tokens that the device shares.

        first: leading blocks of each group that are not read. most: spans, each of 16
        blocks at most. The request may have
        ended, or wait to be added. Returns what could be read: nothing while a step
        waits for masks, or by a runner that copies no contents.
        """
        self.settle()
        # Other engines have no use for blocks without the recurrent state after them.
        lacks = self.runner.cache_layout is None or self.config.recurrent
        if lacks or self._unsampled is not None or self.failure is not None:
            return []
        self._is_unsettled = True
        keys, pools = self.scheduler.block_keys(request), self.scheduler.kv_cache.pools
        starts = first or (0,) * len(pools)
        found = shared_runs(pools, keys, starts)[:most]
        try:
            if self._copies is not None and found:
                self._copies.collect_all(self.runner)
            spans = [read_span(self.runner, each, self._recorder) for each in found]
        except Exception as error:
            self._fail(error)
            spans = []
        self._is_unsettled = False
        return [span for span in spans if span is not None]

    @property
    def carries_state(self) -> bool:
        """Whether sequences have state that goes to other engines with all blocks."""
        config, layout = self.config, self.runner.cache_layout
        if not config.recurrent or config.replay or not config.use_kv_cache:
            return False
        return layout is not None and bool(layout.slotted)

    @property
    def has_tiers(self) -> bool:
        """Whether contents of other engines are stored by their tokens."""
        return self._copies is not None

    def read_state(self, request: Request) -> list[TokenSpan]:
        """Read the state of a running request after its collected tokens.

        No step with it is in flight. Empty for one that has computed nothing, or while
        a step waits for masks.
        """
        self.settle()
        if self.failure is not None or request.in_flight or request.uncertain:
            return []
        self._is_unsettled = True
        try:
            spans = self._read_state(request, request.scheduled)
        except Exception as error:
            self._fail(error)
            spans = []
        self._is_unsettled = False
        return spans

    def _read_state(self, request: Request, tokens: int) -> list[TokenSpan]:
        """Read the state after so many tokens; raises what the runner raises."""
        is_running = request.status is Status.RUNNING
        if not (is_running and tokens and self.carries_state):
            return []
        if self._unsampled is not None:
            return []
        if self._copies is not None:
            self._copies.collect_all(self.runner)
        if self._states is not None:
            self._states.wait_all(self.runner)
        return read_sequence(self.runner, request, tokens, self._recorder)

    def joined_spans(self) -> CarriedSpans:
        """Return what joins the contents of one sequence to blocks of this engine."""
        layout = self.runner.cache_layout
        assert layout is not None, "contents can be copied"
        return CarriedSpans(self.runner.limits, layout, has_slot=self.carries_state)

    def most_carried(self, request: Request) -> int:
        """Return the leading tokens that a request may bring contents of."""
        known = request.prompt_tokens if self.config.replay else len(request.tokens)
        return known - 1

    def carry(
        self, requests: Sequence[Request], state: CarriedState, room: int
    ) -> bool:
        """Let requests that are not added begin with a state of another engine.

        room: bytes of states that may wait; ``False`` if there are more.
        """
        waiting = {
            id(each.carried): each.carried.nbytes
            for each in self.scheduler.live.values()
            if each.carried is not None
        }
        if sum(waiting.values()) + state.nbytes > room:
            return False
        for request in requests:
            request.carried = state
        return True

    def lacking_tokens(self, request: Request) -> int:
        """Return the tokens of full blocks that neither the device nor a tier has.

        All but the last one where state goes with them.
        """
        if self.carries_state:
            has_state = request.carried is not None
            return 0 if has_state else request.prompt_tokens - 1
        scheduler = self.scheduler
        keys, tiers = scheduler.block_keys(request), None
        if self._copies is not None:
            tiers = self._copies.tiers
        hits = scheduler.kv_cache.cached_prefix(keys, tiers)
        return (len(keys) - hits) * self.runner.limits.block_size

    def store_blocks(self, request: Request, group: int, blocks: Blocks) -> int:
        """Store contents of a request's blocks that another engine has computed.

        blocks: index and contents of each. The request has not been added. Returns how
        many are stored: none without tiers, or for a request that shares no blocks.
        """
        keys = self.scheduler.block_keys(request)
        if self._copies is None:
            return 0
        known = [(index, parts) for index, parts in blocks if index < len(keys)]
        for index, parts in known:
            self._copies.tiers.store(group, keys[index], parts)
        return len(known)

    def flush_tiers(self) -> None:
        """Write the blocks that later processes may share to files, if there are any.

        Before the runner is closed; whatever fails is computed again later. Nothing is
        copied afterwards.
        """
        copies, self._copies = self._copies, None
        if copies is None or self.failure is not None or self._is_unsettled:
            return
        try:
            copies.flush(self.scheduler.kv_cache.pools, self.runner)
        except InlError as error:
            log.warning("engine: blocks were not stored: %s", _describe(error))

    def cancel(self, number: int, reason: FinishReason = "cancelled") -> bool:
        """End a request; return whether it was still live.

        The next :meth:`step` returns its last event. Raises
        :class:`~inl.errors.RequestError` for an unknown id.
        """
        self.settle()
        request = self.scheduler.live.get(number)
        if request is not None:
            self._is_unsettled = True
            self._pending.append(self.scheduler.finish(request, reason))
            self._is_unsettled = False
        elif not 1 <= number <= self.scheduler.arrivals:
            raise RequestError(
                f"request: found id {number!r}, accepts ids that add() returned: "
                f"1 to {self.scheduler.arrivals}"
            )
        return request is not None

    def step(self) -> list[Event]:
        """Submit up to ``limits.depth`` steps and collect the oldest one's events."""
        self.settle()
        self._is_unsettled = True
        self._pending += self.scheduler.expire()
        self._fill()
        outputs: list[Event] = []
        if self.failure is None and self.scheduler.in_flight:
            outputs = self._collect()
            self._sample_unsampled()
        if self.failure is not None:
            outputs = self._end_all(self.failure)
        events = [*self._pending, *outputs]
        self._pending.clear()
        self._is_unsettled = False
        return events

    def collect_all(self) -> list[Event]:
        """Collect the steps in flight and submit no other; returns their events."""
        self.settle()
        self._is_unsettled = True
        outputs: list[Event] = []
        while self.failure is None and self.scheduler.in_flight:
            outputs += self._collect()
            self._sample_unsampled()
        events = [*self._pending, *outputs]
        self._pending.clear()
        self._is_unsettled = False
        return events

    def settle(self) -> None:
        """Recover if an exception has interrupted an earlier call."""
        if not self._is_unsettled:
            return
        self._masks.settle()
        if self.failure is None:
            self._recover()
        if self.failure is not None:
            # All requests end with the next step, which needs a consistent scheduler.
            self._start_over(self.scheduler.limits)
        self._is_unsettled = False

    def encode(self, sequences: Sequence[TokenSequence]) -> NDArray[np.float32]:
        """Return the runner's results [n, K] of sequences, of an encoder.

        A runner that is lost is replaced, where the engine does that, and computes
        them again; one whose call failed or was interrupted is reset before the next.
        """
        self._check_runner()
        while True:
            self.settle()
            self._check_runner()
            try:
                self._is_unsettled = True
                results = self.runner.encode(sequences)
                self._is_unsettled = False
                return results
            except WorkerLost as error:
                self._replace_or_fail(error)
                self._is_unsettled = False
                if self.failure is not None:
                    raise

    def _check_runner(self) -> None:
        if self.failure is not None:
            raise RunnerError(
                f"engine: its runner failed ({_describe(self.failure)}); "
                "create another engine"
            ) from self.failure

    def _recover(self) -> None:
        if self._lost is not None:
            self._replace_or_fail(self._lost)
            return
        try:
            self._reset_runner()
        except Exception as error:
            self._replace_or_fail(error)

    def _reset_runner(self) -> None:
        """Reset the runner, on which all live requests start over."""
        self.runner.reset()
        self._start_over(self.runner.limits)
        if self._recorder is not None:
            self._recorder.begin()

    def _start_over(self, limits: Limits) -> None:
        """Let all live requests wait for a runner without steps and slots."""
        self._masks.settle()
        self._unsampled = None
        self._pending += self.scheduler.restart(limits)
        self._discarded_steps.clear()
        if self._copies is not None:
            self._copies.reset()
        if self._states is not None:
            self._states.reset()

    def _fill(self) -> None:
        while (
            self.failure is None
            and self._unsampled is None
            and len(self.scheduler.in_flight) < self.runner.limits.depth
            and not self.scheduler.must_collect
        ):
            plan = self.scheduler.plan()
            if not self._submit(plan):
                continue
            if plan.bucket is None:
                idle = not self.scheduler.live
                assert self.scheduler.in_flight or idle, "work, but no plan"
                return
            self._count(plan, plan.bucket)

    def _submit(self, plan: Plan) -> bool:
        """Submit a plan's frames and masks; ``False`` if that failed."""
        rows = masked_rows(plan)
        ready = are_ready(plan, rows)
        if not self._submit_copies(plan):
            return False
        try:
            if rows and ready:
                self._masks.begin(plan, rows)
            for frame in frames(plan, self.runner.limits, masked=bool(rows)):
                if self._recorder is not None:
                    self._recorder.add(frame)
                self.runner.submit(frame)
            if rows and ready:
                self._submit_masks(plan)
            elif rows:
                self._unsampled = plan
            if self._states is not None and self._unsampled is None:
                self._states.read(plan, self.runner)
        except OutOfMemory as error:
            if header(frame).kind == STEP:
                self._discard_step(plan, error)
            else:
                self._fail(error, plan)
            return False
        # Runners come from plugins: whatever they raise must reach the callers.
        except Exception as error:
            self._fail(error, plan)
            return False
        return True

    def _submit_copies(self, plan: Plan) -> bool:
        """Submit the copies that precede a plan's frames; ``False`` if that failed."""
        try:
            if self._copies is not None:
                self._copies.submit(plan, self.runner)
            if self._states is not None:
                self._states.restore(plan, self.runner)
            for request, length in plan.admissions:
                if request.carried is None:
                    continue
                assert length == request.carried.tokens, "its blocks are its own"
                state = cast("CarriedState", request.carried)
                write_carried(self.runner, request, state, self._recorder)
                request.carried = None
        except Exception as error:
            self._fail(error, plan)
            return False
        return True

    def _sample_unsampled(self) -> None:
        """Submit the masks of the step that waits for them, once they are known."""
        plan = self._unsampled
        if plan is None or self.failure is not None:
            return
        rows = masked_rows(plan)
        if not are_ready(plan, rows):
            return  # with more than two steps in flight
        self._unsampled = None
        self._masks.begin(plan, rows)
        try:
            self._submit_masks(plan)
            if self._states is not None:
                self._states.read(plan, self.runner)
        except Exception as error:
            self._fail(error, plan)

    def _submit_masks(self, plan: Plan) -> None:
        """Submit the masks of a step, and end the requests that have none."""
        assert plan.bucket is not None
        masks, errors = self._masks.result(plan)
        for request, error in errors:
            if request.id in self.scheduler.live:
                self._pending.append(self.scheduler.finish(request, "error", error))
        if self._recorder is not None:
            self._recorder.add(masks)
        width = mask_width(self.runner.limits.vocab)
        self.runner.sample(masks.step, masks.dense(plan.bucket.samples, width))

    def _discard_step(self, plan: Plan, error: OutOfMemory) -> None:
        """Skip a step that the runner did not begin."""
        self._discarded_steps.add(plan.step)
        self._end_rows(plan, error)

    def _end_rows(self, plan: Plan, error: Exception) -> None:
        """End the requests of a step that has no output."""
        for chunk in plan.chunks:
            if chunk.request.id in self.scheduler.live:
                event = self.scheduler.finish(chunk.request, "error", error)
                self._pending.append(event)

    def _fail(self, error: Exception, plan: Plan | None = None) -> None:
        """Go on after an error of the runner, or fail with it; plan: its step."""
        self.failed_steps += 1
        if not isinstance(error, WorkerLost):
            log.error("engine: a step failed: %s", _describe(error), exc_info=error)
            if plan is not None:
                # They may be the cause. A lost worker is the cause itself.
                self._end_rows(plan, error)
            try:
                self._reset_runner()
                return
            except Exception as reason:
                log.error("engine: its runner cannot be reset: %s", _describe(reason))
        self._replace_or_fail(error)

    def _replace_or_fail(self, error: Exception) -> None:
        """Continue on a replacement of the runner, or fail with the error."""
        if self._replace is None:
            self.failure = error
            return
        self._lost = error
        try:
            self._replace_runner(error)
        except Exception as reason:
            self.failure = reason

    def _replace_runner(self, error: Exception) -> None:
        assert self._replace is not None, "checked when the runner was lost"
        self.runner.close()
        self.runner = self._replace(error)
        self._start_over(self.runner.limits)
        self._lost = None
        self.restarts += 1

    def _count(self, plan: Plan, bucket: Bucket) -> None:
        tokens, rows = plan.tokens, len(plan.chunks)
        self._steps += 1
        self._tokens += tokens
        self._rows += rows
        if self._on_step is not None:
            ids = tuple(chunk.request.id for chunk in plan.chunks)
            record = StepRecord(plan.step, bucket, tokens, rows, plan.decode_rows, ids)
            # The state is complete here: an exception of the callback loses nothing.
            self._is_unsettled = False
            self._on_step(record)
            self._is_unsettled = True

    def _collect(self) -> list[Event]:
        plan = self.scheduler.in_flight[0]
        if plan.step in self._discarded_steps:
            self._discarded_steps.remove(plan.step)
            return self.scheduler.process_outputs([0] * len(plan.chunks))
        try:
            reply = self.runner.collect()
            if self._recorder is not None:
                self._recorder.add(reply)
            if reply.loads is not None:
                self.expert_loads.add(reply.loads)
            process = self._processing(reply, plan)
            if self._copies is not None:
                self._copies.collect(plan, self.runner)
            if self._states is not None:
                self._states.wait(plan, self.runner)
            for request, _, stop, _ in plan.chunks[plan.decode_rows :]:
                if request.captures and stop == request.prompt_tokens:
                    request.captured = self._read_state(request, stop)
        except OutOfMemory as error:
            # Workers report it late, when later steps of these rows may have begun.
            self._end_rows(plan, error)
            return self.scheduler.process_outputs([0] * len(plan.chunks))
        except Exception as error:
            self._fail(error, plan)
            return []
        events = process()
        if self._states is not None:
            self._states.store(plan, self.scheduler)
        return events

    def _processing(self, reply: Reply, plan: Plan) -> Callable[[], list[Event]]:
        """Check a reply and return the call that applies it."""
        limits, scheduler = self.runner.limits, self.scheduler
        if plan.kind is not StepKind.SAMPLED:
            none = [NO_TOKEN] * len(plan.chunks)
            if plan.kind is StepKind.SCORED:
                scores = read_prompt_logprobs(reply, plan)
                return partial(scheduler.process_outputs, none, prompt_logprobs=scores)
            keep_hidden(plan, read_hidden(reply, plan))
            return partial(scheduler.process_outputs, none)
        if plan.is_repeated:
            return partial(
                scheduler.process_several, read_repeated(reply, plan, limits)
            )
        if plan.has_drafts:
            accepted = read_accepted(reply, plan, limits)
            scores = read_accepted_logprobs(reply, plan, accepted)
            return partial(scheduler.process_several, accepted, scores)
        tokens = read_tokens(reply, plan, limits)
        return partial(scheduler.process_outputs, tokens, read_logprobs(reply, plan))

    def _end_all(self, error: Exception) -> list[Event]:
        live = list(self.scheduler.live.values())
        return [self.scheduler.finish(each, "error", error) for each in live]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
