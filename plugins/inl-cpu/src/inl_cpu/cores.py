"""How many threads to compute with: what this process may really use.

Processors that its affinity allows, one of each pair that shares a core, no more than
the cgroup's quota; ``INL_THREADS`` overrules all of it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from inl.errors import DeviceError

THREADS = "INL_THREADS"
"""Environment variable with the number of threads to compute with."""

MOST_THREADS = 4096
CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def count_threads() -> int:
    """Threads to compute with; raises :class:`DeviceError` for an odd INL_THREADS."""
    asked = threads_asked_for()
    if asked is not None:
        return asked
    found = len(physical(allowed()))
    limit = quota()
    return max(1, min(found, found if limit is None else max(1, math.floor(limit))))


def threads_asked_for() -> int | None:
    """Read INL_THREADS; ``None`` leaves the number to us."""
    found = os.environ.get(THREADS, "")
    if not found:
        return None
    plain = found.isascii() and found.isdigit() and len(found) <= len(str(MOST_THREADS))
    if not plain or not 1 <= int(found) <= MOST_THREADS:
        raise DeviceError(
            f"environment variable {THREADS}: found {found!r:.80}, "
            f"accepts a whole number from 1 to {MOST_THREADS}"
        )
    return int(found)


def allowed() -> set[int]:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical(processors: set[int]) -> set[int]:
    """One processor of each core: its other threads share the units that compute."""
    cores: dict[str, int] = {}
    for number in sorted(processors):
        place = CPUS / f"cpu{number}" / "topology" / "thread_siblings_list"
        cores.setdefault(_read(place).strip() or f"only {number}", number)
    return set(cores.values())


def quota() -> float | None:
    """Processors' worth of time that the cgroup grants; ``None`` where it has no limit.

    A limit of any group above counts too.
    """
    limits = [limit for place in _groups() if (limit := _limit(place)) is not None]
    return min(limits, default=None)


def _groups() -> list[Path]:
    """Folders of this process's control group and all above it, of both versions."""
    found: list[Path] = []
    for line in _read(CGROUP).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root = CGROUPS
        elif "cpu" in controllers.split(","):
            root = CGROUPS / "cpu"
        else:
            continue
        inner = root / path.strip().lstrip("/")
        # Inside a container the path may name folders that are not mounted.
        found += [root, *(p for p in (inner, *inner.parents) if root in p.parents)]
    return found


def _limit(place: Path) -> float | None:
    given, _, period = _read(place / "cpu.max").partition(" ")
    if not given:
        given = _read(place / "cpu.cfs_quota_us")
        period = _read(place / "cpu.cfs_period_us")
    given, period = given.strip(), period.strip()
    if not given.isdigit() or not period.isdigit() or not int(given) or not int(period):
        return None
    return int(given) / int(period)


def _read(place: Path) -> str:
    try:
        return place.read_text()
    except OSError:
        return ""
