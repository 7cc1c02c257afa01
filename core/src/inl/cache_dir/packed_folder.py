"""The cache folder of packed weights: its size limit, eviction and removal."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from inl.cache_dir.location import cache_folder
from inl.cache_dir.private_folder import PrivateFolder

SUFFIX: Final = ".tiles"
"""Suffix of files of packed weights."""
DISK_SHARE: Final = 10
"""All files take at most one part in this many of the disk by default."""
MOST: Final = 32 << 30
"""Bytes that all files take at most by default."""
RESERVE: Final = 1 << 30
"""Bytes that are left free on the disk."""


class PackedFile(NamedTuple):
    """A file of packed weights."""

    name: str
    size: int
    used_ns: int
    """Time of the last use."""


def packed_folder() -> Path:
    """Return the path of the folder, which may not exist."""
    return cache_folder() / "packed"


def default_limit(folder: PrivateFolder) -> int:
    """Return the default size limit in bytes: a tenth of the disk, at most 32 GiB."""
    return min(folder.disk_bytes() // DISK_SHARE, MOST)


def packed_files(folder: PrivateFolder) -> list[PackedFile]:
    """Return all files of packed weights, the most recently used first."""
    files = []
    for name in folder.names():
        with suppress(OSError):
            if name.endswith(SUFFIX):
                facts = folder.status(name)
                files.append(PackedFile(name, facts.st_size, facts.st_mtime_ns))
    return sorted(files, key=lambda file: -file.used_ns)


def make_room(folder: PrivateFolder, size: int, limit: int) -> None:
    """Make room for a file of ``size`` bytes, so that all take at most ``limit``.

    Removes abandoned files, and the least recently used ones. Raises OSError if the
    file is larger than the limit or the disk has no room for it.
    """
    for name in folder.abandoned():
        folder.remove(name)
    total = size
    for file in packed_files(folder):
        total += file.size
        if total > limit:
            folder.remove(file.name)
    if size > limit:
        raise OSError(f"{size >> 20} MiB exceed the limit of {limit >> 20} MiB")
    free = folder.free_bytes()
    if size + RESERVE > free:
        raise OSError(f"no room for {size >> 20} MiB: the disk has {free >> 20} MiB")


def prune(folder: PrivateFolder) -> list[PackedFile]:
    """Remove all packed weights and abandoned files; returns what was removed.

    Processes that have mapped a file keep it; its bytes are freed when they end.
    """
    found = packed_files(folder)
    for name in folder.abandoned():
        with suppress(OSError):
            facts = folder.status(name)
            found.append(PackedFile(name, facts.st_size, facts.st_mtime_ns))
    return [file for file in found if folder.remove(file.name)]
