"""Looks for the fastest right way of each task, one axis after the other."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from inl.backend.tunable import Facts
from inl.executor.tuning_record import Quarantined, Record, TuningMeasurement, record
from inl.spec.workload import Config, Workload, frozen
from inl.tune.process import Died

BETTER = 0.98
"""What a way takes of another's time to be called faster."""
DUELS = 3
"""Times that the winner and the kernel as it comes are timed once more, in turns."""
CHECKS = 2
"""Fresh inputs on which a way has to be right."""
PATIENCE_SECONDS = 5.0
"""Inputs so large that one check takes longer are checked once."""


class Asked(Protocol):
    """Who tries: a :class:`~inl.tune.process.Child`."""

    def ask(self, do: str, task: int, config: Config, **more: Any) -> Any: ...


@dataclass
class Task:
    """The search at one workload."""

    asked: Asked
    place: int
    work: Workload
    facts: Facts
    kernel: str
    """Label of the kernel that is cut in several ways."""
    plain: str
    """Label of the kernel as it comes."""
    axes: list[list[Config]]
    barred: Collection[tuple[tuple[str, int], ...]] = ()
    """Frozen configs that are not tried: they are in quarantine."""
    tried: Callable[[], None] = lambda: None
    """Told after each way that was tried."""
    times: dict[tuple[tuple[str, int], ...], float] = field(default_factory=dict)
    bad: dict[tuple[tuple[str, int], ...], str] = field(default_factory=dict)

    def run(self, deadline: float) -> Record:
        """Search until ``deadline`` of :func:`time.monotonic`; gives what was found."""
        best = self._descend(deadline)
        self._duel(best)
        before = self.times.get(())
        right = next(self._right_ones(), None)
        entries: list[TuningMeasurement | Quarantined] = [
            Quarantined(self.work, self.facts, self.kernel, dict(key), reason, _today())
            for key, reason in self.bad.items()
        ]  # fmt: skip
        if right is not None:
            seconds = self.times[right]
            entries.append(
                TuningMeasurement(
                    self.work, self.facts, dict(right), seconds,
                    seconds if before is None else before, _today(),
                )
            )  # fmt: skip
        return record(*entries)

    def _descend(self, deadline: float) -> Config:
        """Try each option of each axis beside the best of those before."""
        best: Config = {}
        fastest = self._time(best)
        for axis in self.axes:
            start = best
            for option in axis:
                if time.monotonic() > deadline:
                    return best
                config = {**start, **option}
                spent = self._time(config)
                if spent < BETTER * fastest:
                    best, fastest = config, spent
        return best

    def _time(self, config: Config) -> float:
        key = frozen(config)
        if key in self.times or key in self.bad or key in self.barred:
            self.tried()
            return self.times.get(key, float("inf"))
        answer = self._ask("time", config)
        self.tried()
        if answer is None:
            return float("inf")
        self.times[key] = answer["seconds"]
        return self.times[key]

    def _ask(self, do: str, config: Config, **more: Any) -> Any:
        """Ask about a way; what fails is bad, and the answer ``None``."""
        try:
            answer = self.asked.ask(do, self.place, config, **more)
        except Died as error:
            reason = f"its process {error}"
        else:
            if "error" not in answer:
                return answer
            reason = answer["error"]
            if answer["refused"]:
                self.times.pop(frozen(config), None)
                return None
        self._drop(config, reason)
        return None

    def _drop(self, config: Config, reason: str) -> None:
        self.times.pop(frozen(config), None)
        self.bad[frozen(config)] = reason

    def _duel(self, best: Config) -> None:
        """Time the best and the plain way in turns: the machine may have changed."""
        ways = [config for config in ({}, best) if frozen(config) in self.times]
        if len(ways) < 2 or not best:
            return
        seen: dict[tuple[tuple[str, int], ...], list[float]] = {}
        for _ in range(DUELS):
            for config in ways:
                answer = self._ask("time", config)
                if answer is None:
                    return
                seen.setdefault(frozen(config), []).append(answer["seconds"])
        for key, found in seen.items():
            self.times[key] = statistics.median(found)

    def _right_ones(self) -> Iterator[tuple[tuple[str, int], ...]]:
        """Ways that are right, the fastest first; the plain one where it is as fast."""
        for key in sorted(self.times, key=lambda key: (self.times[key], key)):
            plain = self.times.get((), float("inf"))
            if self.times[key] >= BETTER * plain and self._right({}):
                yield ()
                return
            if key in self.times and self._right(dict(key)):
                yield key

    def _right(self, config: Config) -> bool:
        """Compare a way with the op's body, on inputs that nobody has seen."""
        began = time.monotonic()
        for _ in range(CHECKS):
            if time.monotonic() - began > PATIENCE_SECONDS:
                break
            seed = int.from_bytes(os.urandom(4), "little")
            answer = self._ask("check", config, seed=seed)
            if answer is None:
                return False
            if not answer["passed"]:
                self._drop(config, f"wrong: {answer['verdict']}, seed {seed}")
                return False
        return True


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
