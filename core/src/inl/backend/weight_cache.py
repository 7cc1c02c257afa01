"""Capability of backends that cache packed weights between starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from inl.progress import ProgressReporter

T = TypeVar("T")


class WeightCache(ABC):
    """Capability: reuses weights that an earlier process packed."""

    @abstractmethod
    def load(
        self,
        files: Sequence[Path],
        dtype: str,
        load: Callable[[], T],
        progress: ProgressReporter,
    ) -> T:
        """Call ``load``, which packs all weights of ``files`` for ``dtype``.

        Cached weights may replace the packing; if they turn out to be stale, ``load``
        is called again. progress: its stage is set to PACKING before ``load`` has to
        pack, and to SAVING while the cache is written, which is reported in bytes.
        """
