"""Search for the fastest correct config of one workload, one axis after the other."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from inl.backend.tunable import Facts
from inl.executor.tuning_record import Quarantined, Record, TuningMeasurement, record
from inl.spec.workload import Config, Workload, frozen
from inl.tune.process import ChildDied

ConfigKey: TypeAlias = tuple[tuple[str, int], ...]
"""A config as :func:`~inl.spec.workload.frozen` returns it; ``()`` is the default."""

FASTER = 0.98
"""A config counts as faster below this ratio of the other's time."""
DUEL_ROUNDS = 3
"""Final measurements of the winner and of the default config, alternating."""
CHECKS = 2
"""Random inputs on which a config has to be correct."""
CHECK_SECONDS = 5.0
"""No further check starts after this time: inputs may be large."""


class Measurer(Protocol):
    """Measures and checks configs: a :class:`~inl.tune.process.Child`."""

    def request(self, do: str, task: int, config: Config, **fields: Any) -> Any: ...


@dataclass
class Task:
    """Search of one workload."""

    measurer: Measurer
    index: int
    """Number of the task in requests to the measurer."""
    work: Workload
    facts: Facts
    kernel: str
    """Label of the tunable kernel."""
    default_kernel: str
    """Label of the kernel that the backend lists, with the empty config."""
    axes: list[list[Config]]
    quarantined: Collection[ConfigKey] = ()
    """Configs that are not measured."""
    on_config: Callable[[], None] = lambda: None
    """Called after each config."""
    seconds: dict[ConfigKey, float] = field(default_factory=dict)
    """Measured time of each config that works."""
    failures: dict[ConfigKey, str] = field(default_factory=dict)
    """Reason for each config to quarantine."""

    def run(self, deadline: float) -> Record:
        """Search until ``deadline`` of :func:`time.monotonic`.

        Returns the fastest correct config and the configs to quarantine.
        """
        best = self._descend(deadline)
        self._duel(best)
        before = self.seconds.get(())
        winner = next(self._correct_configs(), None)
        entries: list[TuningMeasurement | Quarantined] = [
            Quarantined(
                self.work, self.facts, self.kernel if key else self.default_kernel,
                dict(key), reason, _today(),
            )
            for key, reason in self.failures.items()
        ]  # fmt: skip
        if winner is not None:
            seconds = self.seconds[winner]
            entries.append(
                TuningMeasurement(
                    self.work, self.facts, dict(winner), seconds,
                    seconds if before is None else before, _today(),
                )
            )  # fmt: skip
        return record(*entries)

    def _descend(self, deadline: float) -> Config:
        """Coordinate descent: try each option of an axis with the best so far."""
        best: Config = {}
        fastest = self._time(best)
        for axis in self.axes:
            start = best
            for option in axis:
                if time.monotonic() > deadline:
                    return best
                config = {**start, **option}
                seconds = self._time(config)
                if seconds < FASTER * fastest:
                    best, fastest = config, seconds
        return best

    def _time(self, config: Config) -> float:
        key = frozen(config)
        if key in self.seconds or key in self.failures or key in self.quarantined:
            self.on_config()
            return self.seconds.get(key, float("inf"))
        reply = self._request("time", config)
        self.on_config()
        if reply is None:
            return float("inf")
        self.seconds[key] = reply["seconds"]
        return self.seconds[key]

    def _request(self, do: str, config: Config, **fields: Any) -> Any:
        """Send a request; ``None`` if the config failed or its kernel refused."""
        try:
            reply = self.measurer.request(do, self.index, config, **fields)
        except ChildDied as error:
            reason = f"its process {error}"
        else:
            if "error" not in reply:
                return reply
            reason = reply["error"]
            if reply["refused"]:
                self.seconds.pop(frozen(config), None)
                return None
        self._fail(config, reason)
        return None

    def _fail(self, config: Config, reason: str) -> None:
        self.seconds.pop(frozen(config), None)
        self.failures[frozen(config)] = reason

    def _duel(self, best: Config) -> None:
        """Measure the best and the default config alternately.

        The clock rate or load of the machine may have changed since their first
        measurements.
        """
        configs = [config for config in ({}, best) if frozen(config) in self.seconds]
        if len(configs) < 2 or not best:
            return
        rounds: dict[ConfigKey, list[float]] = {}
        for _ in range(DUEL_ROUNDS):
            for config in configs:
                reply = self._request("time", config)
                if reply is None:
                    return
                rounds.setdefault(frozen(config), []).append(reply["seconds"])
        for key, seconds in rounds.items():
            self.seconds[key] = statistics.median(seconds)

    def _correct_configs(self) -> Iterator[ConfigKey]:
        """Yield correct configs, fastest first; the default one if it is as fast."""
        for key in sorted(self.seconds, key=lambda key: (self.seconds[key], key)):
            default = self.seconds.get((), float("inf"))
            if self.seconds[key] >= FASTER * default and self._is_correct({}):
                yield ()
                return
            if key in self.seconds and self._is_correct(dict(key)):
                yield key

    def _is_correct(self, config: Config) -> bool:
        """Compare a config with the op's body on new random inputs."""
        began = time.monotonic()
        for _ in range(CHECKS):
            if time.monotonic() - began > CHECK_SECONDS:
                break
            seed = int.from_bytes(os.urandom(4), "little")
            reply = self._request("check", config, seed=seed)
            if reply is None:
                return False
            if not reply["passed"]:
                self._fail(config, f"wrong: {reply['verdict']}, seed {seed}")
                return False
        return True


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
