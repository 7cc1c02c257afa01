"""Number of threads to compute with: the processors this process may use.

One processor of each physical core in the affinity mask, at most the CPU quota of the
cgroup. ``INL_THREADS`` overrides all of it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from inl.backend.host import read_text
from inl.errors import DeviceError
from inl_cpu.system_cores import system_cores

THREADS = "INL_THREADS"
"""Environment variable: the number of threads."""

MAX_THREADS = 4096
CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def count_threads() -> int:
    """Number of threads; raises :class:`DeviceError` for an invalid INL_THREADS."""
    requested = requested_threads()
    if requested is not None:
        return requested
    cores = system_cores() or len(one_per_core(allowed_processors()))
    limit = cpu_quota()
    return max(1, min(cores, cores if limit is None else max(1, math.floor(limit))))


def requested_threads() -> int | None:
    """Value of INL_THREADS, or ``None`` if unset or empty."""
    value = os.environ.get(THREADS, "")
    if not value:
        return None
    digits = value.isascii() and value.isdigit() and len(value) <= len(str(MAX_THREADS))
    if not digits or not 1 <= int(value) <= MAX_THREADS:
        raise DeviceError(
            f"environment variable {THREADS}: found {value!r:.80}, "
            f"accepts a whole number from 1 to {MAX_THREADS}"
        )
    return int(value)


def allowed_processors() -> set[int]:
    """Processors in the affinity mask of this process."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def one_per_core(processors: set[int]) -> set[int]:
    """One processor of each core: hardware threads share the arithmetic units."""
    cores: dict[str, int] = {}
    for number in sorted(processors):
        path = CPUS / f"cpu{number}" / "topology" / "thread_siblings_list"
        cores.setdefault(read_text(path) or f"only {number}", number)
    return set(cores.values())


def cpu_quota() -> float | None:
    """CPU quota of the cgroup and its ancestors in processors, or ``None``."""
    limits = [limit for group in _groups() if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def _groups() -> list[Path]:
    """Folders of this process's cgroup and all its ancestors, of v1 and v2."""
    folders: list[Path] = []
    for line in read_text(CGROUP).splitlines():
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
        folders += [root, *(p for p in (inner, *inner.parents) if root in p.parents)]
    return folders


def _limit(group: Path) -> float | None:
    quota, _, period = read_text(group / "cpu.max").partition(" ")
    if not quota:
        quota = read_text(group / "cpu.cfs_quota_us")
        period = read_text(group / "cpu.cfs_period_us")
    quota, period = quota.strip(), period.strip()
    if not quota.isdigit() or not period.isdigit() or not int(quota) or not int(period):
        return None
    return int(quota) / int(period)
