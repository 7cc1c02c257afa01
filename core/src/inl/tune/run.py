"""All of a tuning: opens a child, searches each task, hands on what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from inl.backend.tunable import Facts
from inl.executor.tuning_record import Record
from inl.spec.workload import Workload, frozen
from inl.tune.process import Child
from inl.tune.search import Task
from inl.tune.trials import Wanted

Told = Callable[[int, int], None]


class Found(NamedTuple):
    """What was found at one workload."""

    record: Record
    tried: int
    ways: int
    """That there are; fewer are tried where time runs out."""


def tune(
    wanted: Wanted,
    known: Record,
    deadline: float,
    *,
    limit: float,
    told: Told | None = None,
    seed: int = 0,
) -> Iterator[Found]:
    """Search until ``deadline`` of :func:`time.monotonic`; what each task found.

    known: whose quarantine is kept to. limit: seconds after which a way hangs. told:
    hears of ways tried, and of how many. Raises :class:`~inl.errors.RequestError`
    where there is nothing to tune.
    """
    with Child(wanted, seed, limit=limit) as child:
        facts = Facts(**child.facts)
        total = sum(1 + sum(map(len, task["axes"])) for task in child.tasks)
        done = 0
        for place, given in enumerate(child.tasks):
            work = Workload(**given["work"])
            start = done

            def tried() -> None:
                nonlocal done
                done += 1
                if told is not None:
                    told(min(done, total - 1), total)

            task = Task(
                child, place, work, facts, given["kernel"], given["plain"],
                given["axes"], barred=_barred(known, work, facts), tried=tried,
            )  # fmt: skip
            now = time.monotonic()
            share = max(deadline - now, 0) / (len(child.tasks) - place)
            ways = 1 + sum(map(len, given["axes"]))
            found = task.run(now + share)
            yield Found(found, done - start, ways)
            done = start + ways
    if told is not None:
        told(total, total)


def _barred(
    known: Record, work: Workload, facts: Facts
) -> frozenset[tuple[tuple[str, int], ...]]:
    entries = known.quarantined.values()
    mine = (e for e in entries if (e.work, e.facts) == (work, facts))
    return frozenset(frozen(entry.config) for entry in mine)
