"""The engine core: plans steps, runs them on a runner, and returns events.

Works on token ids only; it knows neither text nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from inl.engine.reply_check import read_logprobs, read_tokens
from inl.errors import OutOfMemory, RequestError, RunnerError, WorkerLost
from inl.protocol.runner import Runner
from inl.protocol.token_masks import TokenMasks, mask_width
from inl.scheduling.frame_encoder import frames, token_masks
from inl.scheduling.plan import Plan, SchedulerConfig
from inl.scheduling.request import Event, FinishReason, Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import STEP, header
from inl.spec.step import Bucket

if TYPE_CHECKING:
    from inl.recording.recorder import Recorder


class StepRecord(NamedTuple):
    """Composition of one submitted step."""

    step: int
    bucket: Bucket
    tokens: int
    """Tokens computed, without padding."""
    rows: int
    decode_rows: int
    requests: tuple[int, ...]
    """Request id of each row."""


class Stats(NamedTuple):
    """Totals since the engine started."""

    steps: int
    """Steps submitted."""
    tokens: int
    """Tokens computed, without padding."""
    rows: int
    """Rows of all steps: ``rows / steps`` is the mean batch size."""
    preemptions: int
    """Times that a request lost its blocks to an earlier one."""
    prefix_hit_tokens: int
    """Tokens taken from the prefix cache."""


class EngineCore:
    """Serves requests on one runner. Not thread-safe.

    The caller closes the runner. If the runner is out of memory for a step, the
    requests of that step end with :class:`~inl.errors.OutOfMemory` and the others
    continue. If the runner fails, every live request ends with that error and the
    engine refuses further requests. If it is a lost worker, ``replace`` may return a
    new runner, on which all live requests start over from their token ids; the lost
    one is closed here.

    on_step: called after each submitted step. recorder: records frames and replies.
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig | None = None,
        *,
        scheduler: Scheduler | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        recorder: Recorder | None = None,
        replace: Callable[[WorkerLost], Runner] | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler or Scheduler(runner.limits, config)
        self.restarts = 0
        """Lost runners that were replaced."""
        self._recorder = recorder
        self._replace = replace
        self._on_step = on_step
        self._live: dict[int, Request] = {}
        self._pending: list[Event] = []
        """Events that the next step returns."""
        self._failure: Exception | None = None
        self._discarded_steps: set[int] = set()
        """Planned steps that the runner has no memory for."""
        self._steps = self._tokens = self._rows = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything left to compute or to return."""
        if self._live or self._pending:
            return True
        idle = not self.scheduler.in_flight and not self.scheduler.has_releases
        return self._failure is None and not idle

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
        )

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises :class:`~inl.errors.RequestError` if it cannot be served, and
        :class:`~inl.errors.RunnerError` after the runner has failed.
        """
        if self._failure is not None:
            raise RunnerError(
                f"engine: its runner failed ({_describe(self._failure)}); "
                "create another engine"
            ) from self._failure
        number = self.scheduler.add(request)
        self._live[number] = request
        return number

    def cancel(self, number: int, reason: FinishReason = "cancelled") -> bool:
        """End a request; return whether it was still live.

        The next :meth:`step` returns its last event. Raises
        :class:`~inl.errors.RequestError` for an unknown id.
        """
        request = self._live.pop(number, None)
        if request is not None:
            self._pending.append(self.scheduler.finish(request, reason))
        elif not 1 <= number <= self.scheduler.arrivals:
            raise RequestError(
                f"request: found id {number!r}, accepts ids that add() returned: "
                f"1 to {self.scheduler.arrivals}"
            )
        return request is not None

    def step(self) -> list[Event]:
        """Submit up to ``limits.depth`` steps and collect the oldest one's events."""
        self._fill()
        events, self._pending = self._pending, []
        if self._failure is None and self.scheduler.in_flight:
            events += self._collect()
        if self._failure is not None:
            events += self._end_all(self._failure)
        return events

    def _fill(self) -> None:
        while (
            self._failure is None
            and len(self.scheduler.in_flight) < self.runner.limits.depth
        ):
            plan = self.scheduler.plan()
            if not self._submit(plan):
                continue
            if plan.bucket is None:
                assert self.scheduler.in_flight or not self._live, "work, but no plan"
                return
            self._count(plan, plan.bucket)

    def _submit(self, plan: Plan) -> bool:
        """Submit a plan's frames and masks; ``False`` if that failed."""
        masks = token_masks(plan)
        try:
            for frame in frames(plan, self.runner.limits, masked=masks is not None):
                if self._recorder is not None:
                    self._recorder.add(frame)
                self.runner.submit(frame)
            if masks is not None:
                self._submit_masks(plan, masks)
        except OutOfMemory as error:
            if header(frame).kind == STEP:
                self._discard_step(plan, error)
            else:
                self._fail(error)
            return False
        # Runners come from plugins: whatever they raise must reach every caller.
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _submit_masks(self, plan: Plan, masks: TokenMasks) -> None:
        assert plan.bucket is not None
        if self._recorder is not None:
            self._recorder.add(masks)
        width = mask_width(self.runner.limits.vocab)
        self.runner.sample(masks.step, masks.dense(plan.bucket.rows, width))

    def _discard_step(self, plan: Plan, error: OutOfMemory) -> None:
        """Skip a step that the runner did not begin."""
        self._discarded_steps.add(plan.step)
        self._end_rows(plan, error)

    def _end_rows(self, plan: Plan, error: OutOfMemory) -> None:
        """End the requests of a step that has no output."""
        for chunk in plan.chunks:
            if self._live.pop(chunk.request.id, None) is not None:
                event = self.scheduler.finish(chunk.request, "error")
                self._pending.append(event._replace(error=error))

    def _fail(self, error: Exception) -> None:
        """Continue on a replacement of the runner, or fail with the error."""
        if self._replace is None or not isinstance(error, WorkerLost):
            self._failure = error
            return
        self.runner.close()
        try:
            self.runner = self._replace(error)
            self.scheduler.restart(self.runner.limits)
            self._discarded_steps.clear()
        except Exception as reason:
            self._failure = reason
            return
        self.restarts += 1

    def _count(self, plan: Plan, bucket: Bucket) -> None:
        tokens, rows = plan.tokens, len(plan.chunks)
        self._steps += 1
        self._tokens += tokens
        self._rows += rows
        if self._on_step is not None:
            ids = tuple(chunk.request.id for chunk in plan.chunks)
            self._on_step(
                StepRecord(plan.step, bucket, tokens, rows, plan.decode_rows, ids)
            )

    def _collect(self) -> list[Event]:
        plan = self.scheduler.in_flight[0]
        if plan.step in self._discarded_steps:
            self._discarded_steps.remove(plan.step)
            return self.scheduler.process_outputs([0] * len(plan.chunks))
        try:
            reply = self.runner.collect()
            if self._recorder is not None:
                self._recorder.add(reply)
            tokens = read_tokens(reply, plan, self.runner.limits)
            logprobs = read_logprobs(reply, plan)
        except OutOfMemory as error:
            # Workers report it late, when later steps of these rows may have begun.
            self._end_rows(plan, error)
            return self.scheduler.process_outputs([0] * len(plan.chunks))
        except Exception as error:
            self._fail(error)
            return []
        events = self.scheduler.process_outputs(tokens, logprobs)
        for event in events:
            if event.finish_reason is not None:
                del self._live[event.request]
        return events

    def _end_all(self, error: Exception) -> list[Event]:
        ended = [self.scheduler.finish(each, "error") for each in self._live.values()]
        self._live.clear()
        return [event._replace(error=error) for event in ended]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
