"""Tunes all workloads of a model within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from inl.backend.tunable import Facts
from inl.executor.tuning_record import Record
from inl.spec.workload import Workload, frozen
from inl.tune.process import Child
from inl.tune.search import ConfigKey, Task
from inl.tune.trials import TuningOptions

OnProgress = Callable[[int, int], None]


class TaskResult(NamedTuple):
    """Result of one workload."""

    record: Record
    tried: int
    """Number of configs that were measured within the time budget."""
    total: int
    """Number of configs in the search space."""


def tune(
    options: TuningOptions,
    known: Record,
    deadline: float,
    *,
    limit: float,
    on_progress: OnProgress | None = None,
    seed: int = 0,
) -> Iterator[TaskResult]:
    """Tune each workload in turn, until ``deadline`` of :func:`time.monotonic`.

    known: earlier results; quarantined configs are not measured again. limit: seconds
    after which a config counts as hanging. on_progress: called with the number of
    configs measured and their total. Raises :class:`~inl.errors.RequestError` if there
    is nothing to tune.
    """
    with Child(options, seed, limit=limit) as child:
        facts = Facts(**child.facts)
        total = sum(map(_count, child.tasks))
        done = 0
        for index, description in enumerate(child.tasks):
            work = Workload(**description["work"])
            start = done

            def count_config() -> None:
                nonlocal done
                done += 1
                if on_progress is not None:
                    on_progress(min(done, total - 1), total)

            task = Task(
                child, index, work, facts, description["kernel"],
                description["default_kernel"], description["axes"],
                quarantined=_quarantined(known, work, facts), on_config=count_config,
            )  # fmt: skip
            now = time.monotonic()
            seconds = max(deadline - now, 0) / (len(child.tasks) - index)
            configs = _count(description)
            yield TaskResult(task.run(now + seconds), done - start, configs)
            done = start + configs
    if on_progress is not None:
        on_progress(total, total)


def _count(description: dict[str, Any]) -> int:
    """Return the number of configs of a task, with the default one."""
    return 1 + sum(map(len, description["axes"]))


def _quarantined(known: Record, work: Workload, facts: Facts) -> frozenset[ConfigKey]:
    entries = known.quarantined.values()
    matching = (e for e in entries if (e.work, e.facts) == (work, facts))
    return frozenset(frozen(entry.config) for entry in matching)
