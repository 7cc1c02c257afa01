"""How many tokens a step may have in which sequences decode beside prompts.

Their next tokens arrive with the end of the step, so it should be short; but each step
costs time of its own. Where many prompts wait, whose last one waits for many steps in
any case, steps have a part of all their tokens. These bounds are numbers of tokens, the
same in every run. ``SchedulerConfig.inter_token_ms`` sets one in milliseconds instead,
by the measured times of earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from inl.scheduling.step_timer import StepTimer

if TYPE_CHECKING:
    from inl.scheduling.plan import Plan, SchedulerConfig

PART = 4
"""Steps with decoding sequences have this part of the token budget."""

LEAST_BUDGET = 2048
"""Token budgets up to this one are not divided."""

WAITING_PART = 8
"""Steps have this part of the prompts that wait, if that is more."""

LEAST_TOKENS = 64
"""Fewest tokens of prompts in a step, however long it takes."""

WEIGHT = 0.2
"""Weight of the newest time in the estimate."""


class MixedSteps:
    """Bounds steps with prompts beside decoding sequences."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._most = config.token_budget
        self._usual = max(self._most // PART, min(self._most, LEAST_BUDGET))
        bound = config.inter_token_ms
        self._seconds = None if bound is None else bound / 1e3
        self._timer = StepTimer(clock)
        self._token_seconds: float | None = None
        """Estimated seconds of a step for each of its tokens; ``None`` until one with
        prompts beside decoding sequences is measured."""

    def tokens(self, rows: int, waiting: int) -> int:
        """Return the most tokens of a step in which ``rows`` sequences decode.

        waiting: tokens of prompts that are to be computed.
        """
        if self._seconds is None or self._token_seconds is None:
            fitting = max(self._usual, waiting // WAITING_PART)
        else:
            fitting = int(self._seconds / max(self._token_seconds, 1e-12))
        return min(self._most, max(fitting, rows + LEAST_TOKENS))

    def planned(self, *, is_first: bool) -> None:
        """Note that a step is submitted; is_first: no other one is in flight."""
        if self._seconds is not None:
            self._timer.planned(is_first=is_first)

    def collected(self, plan: Plan) -> None:
        """Note that the oldest step in flight is collected."""
        if self._seconds is None:
            return
        taken = self._timer.collected()
        if not 0 < plan.decode_rows < len(plan.chunks):
            return
        seconds = taken / plan.tokens
        known = self._token_seconds
        self._token_seconds = (
            seconds if known is None else known + WEIGHT * (seconds - known)
        )
