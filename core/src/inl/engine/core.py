"""The loop between a scheduler and a runner: ids in, events out, no text, no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import (
    OutOfMemory,
    ProtocolError,
    RequestError,
    RunnerError,
    WorkerLost,
)
from inl.protocol.runner import Limits, Reply, Runner
from inl.scheduling.frame_encoder import STEP_NUMBERS, frames
from inl.scheduling.plan import Plan, SchedulerConfig
from inl.scheduling.request import Event, Reason, Request
from inl.scheduling.sampling_params import TokenLogprob
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import STEP, header
from inl.spec.step import Bucket

if TYPE_CHECKING:
    from inl.recording.recorder import Recorder


class StepRecord(NamedTuple):
    """What one submitted step was made of."""

    step: int
    bucket: Bucket
    tokens: int
    """Tokens computed, without padding."""
    rows: int
    decode_rows: int
    requests: tuple[int, ...]
    """Request of each row."""


class Stats(NamedTuple):
    """Totals since the engine began."""

    steps: int
    """Steps submitted."""
    tokens: int
    """Tokens computed, without padding."""
    rows: int
    """Rows of all steps, so ``rows / steps`` is the mean batch."""
    preemptions: int
    prefix_hit_tokens: int


class EngineCore:
    """Serves requests on one runner. One caller, one thread.

    The runner is the caller's to close. Where it has no memory for a step, that step's
    requests end with :class:`~inl.errors.OutOfMemory` and the others go on. Where it
    fails, every live request ends with that error and the engine refuses further
    requests. If it is a worker that was lost, ``replace`` may give a fresh runner, on
    which all live requests start over from their ids; the lost one is closed here.
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
        """Runners that took the place of a lost one."""
        self._recorder = recorder
        self._replace = replace
        self._on_step = on_step
        self._live: dict[int, Request] = {}
        self._pending: list[Event] = []
        self._failure: Exception | None = None
        self._discarded_steps: set[int] = set()
        """Steps in flight that the runner refused."""
        self._steps = self._tokens = self._rows = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything left to do or to tell."""
        if self._live or self._pending:
            return True
        idle = not self.scheduler.in_flight and not self.scheduler.has_releases
        return self._failure is None and not idle

    @property
    def stats(self) -> Stats:
        """Totals up to now."""
        found = self.scheduler
        return Stats(
            self._steps,
            self._tokens,
            self._rows,
            found.preemptions,
            found.prefix_hit_tokens,
        )

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises :class:`~inl.errors.RequestError` where it cannot be served, and
        :class:`~inl.errors.RunnerError` once the runner has failed.
        """
        if self._failure is not None:
            raise RunnerError(
                f"engine: stopped when its runner failed ({_name(self._failure)}); "
                "make another engine"
            ) from self._failure
        number = self.scheduler.add(request)
        self._live[number] = request
        return number

    def cancel(self, number: int, reason: Reason = "cancelled") -> bool:
        """End a request; tell whether it was still live.

        Its last event comes with the next :meth:`step`. Raises
        :class:`~inl.errors.RequestError` for an id that was never given.
        """
        request = self._live.pop(number, None)
        if request is not None:
            self._pending.append(self.scheduler.finish(request, reason))
        elif not 1 <= number <= self.scheduler.arrivals:
            raise RequestError(
                f"request: found id {number!r}, this engine has given "
                f"1 to {self.scheduler.arrivals}"
            )
        return request is not None

    def step(self) -> list[Event]:
        """Submit steps until enough are in flight, then collect the oldest."""
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
            self._record(plan, plan.bucket)

    def _submit(self, plan: Plan) -> bool:
        try:
            for frame in frames(plan, self.runner.limits):
                if self._recorder is not None:
                    self._recorder.add(frame)
                self.runner.submit(frame)
        except OutOfMemory as error:
            if header(frame).kind == STEP:
                self._discard_step(plan, error)
            else:
                self._fail(error)
            return False
        # A runner is anyone's code: whatever it raises must reach every caller.
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _discard_step(self, plan: Plan, error: OutOfMemory) -> None:
        """Forget a step that the runner did not begin."""
        self._discarded_steps.add(plan.step)
        self._end_rows(plan, error)

    def _end_rows(self, plan: Plan, error: OutOfMemory) -> None:
        """End the requests of a step that chose nothing."""
        for chunk in plan.chunks:
            if self._live.pop(chunk.request.id, None) is not None:
                event = self.scheduler.finish(chunk.request, "error")
                self._pending.append(event._replace(error=error))

    def _fail(self, error: Exception) -> None:
        """Go on with a fresh runner, or end with the error."""
        if self._replace is None or not isinstance(error, WorkerLost):
            self._failure = error
            return
        self.runner.close()
        try:
            fresh = self._replace(error)
            self.runner = fresh
            self.scheduler.restart(fresh.limits)
            self._discarded_steps.clear()
        except Exception as reason:
            self._failure = reason
            return
        self.restarts += 1

    def _record(self, plan: Plan, bucket: Bucket) -> None:
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
            tokens = _chosen(reply, plan, self.runner.limits)
            scores = _scores(reply, plan)
        except OutOfMemory as error:
            # A runner elsewhere tells of it late; steps behind it may have begun.
            self._end_rows(plan, error)
            return self.scheduler.process_outputs([0] * len(plan.chunks))
        except Exception as error:
            self._fail(error)
            return []
        events = self.scheduler.process_outputs(tokens, scores)
        for event in events:
            if event.reason is not None:
                del self._live[event.request]
        return events

    def _end_all(self, error: Exception) -> list[Event]:
        ended = [self.scheduler.finish(each, "error") for each in self._live.values()]
        self._live.clear()
        return [event._replace(error=error) for event in ended]


def _chosen(reply: Reply, plan: Plan, limits: Limits) -> list[int]:
    """Return one token a row; raises ``ProtocolError`` for a reply that cannot be."""
    rows = len(plan.chunks)
    step = plan.step % STEP_NUMBERS
    if reply.step != step:
        raise ProtocolError(f"reply: found step {reply.step}, expected {step}")
    shape = reply.tokens.shape
    if len(shape) != 2 or shape[0] < rows or shape[1] != 1:
        raise ProtocolError(
            f"reply of step {plan.step}: found tokens {list(shape)}, "
            f"expected [{rows} or more, 1]"
        )
    tokens: list[int] = reply.tokens[:rows, 0].tolist()
    if min(tokens) < 0 or max(tokens) >= limits.vocab:
        bad = next(token for token in tokens if not 0 <= token < limits.vocab)
        raise ProtocolError(
            f"reply of step {plan.step}, row {tokens.index(bad)}: found token {bad}, "
            f"the vocabulary is 0 to {limits.vocab - 1}"
        )
    return tokens


def _scores(reply: Reply, plan: Plan) -> list[TokenLogprob]:
    """Return what a reply tells of each row; raises ``ProtocolError``."""
    rows = len(plan.chunks)
    assert plan.bucket is not None
    if plan.bucket.sampler != "sample_filtered" or not any(
        chunk.request.logprobs is not None for chunk in plan.chunks
    ):
        return []
    found = reply.scores
    if found is None or min(len(part) for part in found) < rows:
        raise ProtocolError(
            f"reply of step {plan.step}: found no scores of {rows} rows, "
            "which a full program tells"
        )
    chosen, ids, values = (part[:rows].tolist() for part in found)
    tokens = reply.tokens[:rows, 0].tolist()
    return [
        TokenLogprob(
            tokens[row], chosen[row], tuple(zip(ids[row], values[row], strict=True))
        )
        for row in range(rows)
    ]


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
