"""Capability of backends that cache packed weights between starts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from inl.progress import ProgressReporter

T = TypeVar("T")


class FileIdentity(NamedTuple):
    """Which file it is, and its last change; equal only while it is not changed.

    No program can set ``ctime_ns``: it changes with the contents, the times and the
    name.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity of a file with this status."""
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


class WeightCache(ABC):
    """Capability: reuses weights that an earlier process packed."""

    @abstractmethod
    def load(
        self,
        files: Mapping[Path, FileIdentity | None],
        dtype: str,
        load: Callable[[], T],
        progress: ProgressReporter,
        *,
        variant: str = "",
    ) -> T:
        """Call ``load``, which packs all weights of ``files`` for ``dtype``.

        Cached weights may replace the packing; if they turn out to be stale, ``load``
        is called again. files: those that determine the weights, with their identity
        when they were opened (``None`` if unknown); weights of a file that has changed
        since must not be cached. progress: its stage is set to PACKING before ``load``
        has to pack. variant: names another division of the weights into groups; passed
        only if it is not empty. The cache may still be written when this returns.
        """
