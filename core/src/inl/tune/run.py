"""All of a tuning: opens a child, searches each task, hands on what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from inl.backend.tunable import Facts
from inl.runtime.tuned_record import Record
from inl.spec.workload import Workload, frozen
from inl.tune.process import Child
from inl.tune.search import Task
from inl.tune.trials import Wanted

Told = Callable[[int, int], None]


def tune(
    wanted: Wanted,
    known: Record,
    deadline: float,
    *,
    limit: float,
    told: Told | None = None,
    seed: int = 0,
) -> Iterator[Record]:
    """Search until ``deadline`` of :func:`time.monotonic`; a record for each task.

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
            yield task.run(now + share)
            done = start + 1 + sum(map(len, given["axes"]))
    if told is not None:
        told(total, total)


def _barred(
    known: Record, work: Workload, facts: Facts
) -> frozenset[tuple[tuple[str, int], ...]]:
    entries = known.quarantined.values()
    mine = (e for e in entries if (e.work, e.facts) == (work, facts))
    return frozenset(frozen(entry.config) for entry in mine)
