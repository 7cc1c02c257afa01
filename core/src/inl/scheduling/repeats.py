"""Repeats decoding steps: several tokens of each row in one step of the runner.

A step is repeated only if nothing has to happen between its tokens: no request computes
its prompt or could be admitted, no row samples under a mask or reports
log-probabilities, and the blocks of all tokens are free. While requests wait for a row,
the step ends with the first row that reaches its token limit.

Each row stops at its end tokens and its token limit, so that its next position is known
in advance. What arrives meanwhile, such as a cancellation or a request, takes effect
after the steps in flight; therefore a repeated step is expected to take at most
``SchedulerConfig.repeat_seconds``, from the measured time of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from inl.scheduling.plan import Chunk, Plan, SchedulerConfig, StepBuilder
from inl.scheduling.step_timer import StepTimer

if TYPE_CHECKING:
    from inl.scheduling.buckets import Buckets
    from inl.scheduling.running_requests import RunningRequests

SLOWER_WEIGHT = 0.1
"""Weight of a time that is longer than the estimate. A shorter one replaces it, so that
a step that had to be compiled is forgotten soon."""


class Repeats:
    """Decides how often steps are repeated, and adds the further tokens to a plan."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._most = config.decode_steps if config.use_kv_cache else 1
        self.seconds = config.repeat_seconds
        """Most expected seconds of a repeated step."""
        self._timer = StepTimer(clock)
        self._step_seconds: float | None = None
        """Estimated seconds of a decoding step; ``None`` until one is measured."""

    @property
    def steps(self) -> int:
        """Most decoding steps of the next step of the runner."""
        if self._most == 1 or self.seconds == float("inf"):
            return self._most
        if self._step_seconds is None:
            return 1
        affordable = self.seconds / max(self._step_seconds, 1e-9)
        return max(1, min(self._most, int(affordable)))

    def extend(
        self,
        step: StepBuilder,
        requests: RunningRequests,
        buckets: Buckets,
        *,
        waiting: bool = False,
    ) -> None:
        """Repeat a step of decoding rows, if all of them can be repeated.

        waiting: whether requests wait until a row ends.
        """
        rows = step.chunks
        most = buckets.stop_ids
        if self.steps == 1 or not all(_is_repeatable(row, most) for row in rows):
            return
        left = [chunk.request.max_scheduled - chunk.start for chunk in rows]
        count = min(self.steps, min(left) if waiting else max(left))
        # Programs are compiled for one number of steps, of which rows use fewer.
        padded = buckets.padded(rows)[1]
        program = buckets.choose_repeater(padded, self._most, step.sampler)
        if count == 1 or program is None:
            return
        step.program = program
        for at, chunk in enumerate(rows):
            more = min(count - 1, chunk.request.max_scheduled - chunk.stop)
            more = requests.steps_to_snapshot(chunk.request, chunk.start, more + 1) - 1
            more = requests.grow_ahead(step, chunk.request, chunk.stop, more)
            step.chunks[at] = chunk._replace(stop=chunk.stop + more)
            chunk.request.scheduled += more
        for request, start, _, _ in step.chunks if requests.has_windows else ():
            room = requests.update_room(step, request.data_rank)
            requests.free_out_of_window(step, request, max_updates=room, position=start)

    def planned(self, *, is_first: bool) -> None:
        """Note that a step is submitted; is_first: no other one is in flight."""
        if self._most > 1:
            self._timer.planned(is_first=is_first)

    def collected(self, plan: Plan, steps: int = 1) -> None:
        """Note that the oldest step in flight is collected, after ``steps`` steps."""
        if self._most == 1:
            return
        seconds = self._timer.collected()
        if steps and plan.decode_rows == len(plan.chunks):
            self._observe(seconds / steps)

    def _observe(self, seconds: float) -> None:
        known = self._step_seconds
        if known is None or seconds < known:
            self._step_seconds = seconds
        else:
            self._step_seconds = known + SLOWER_WEIGHT * (seconds - known)


def _is_repeatable(chunk: Chunk, stop_ids: int) -> bool:
    """Whether the device can compute more tokens of a row without the host.

    stop_ids: the most that it can compare with.
    """
    request = chunk.request
    return (
        chunk.stop >= request.host_token_count
        and not request.uncertain
        and not request.moves
        and request.guide is None
        and request.token_mask is None
        and request.logprobs is None
        and len(request.end_ids) <= stop_ids
    )
