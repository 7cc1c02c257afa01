"""Capability of backends that cache packed weights between starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class WeightCache(ABC):
    """Capability: reuses weights that an earlier process packed."""

    @abstractmethod
    def load(self, files: Sequence[Path], dtype: str, load: Callable[[], T]) -> T:
        """Return ``load()``, which packs all weights of ``files`` for ``dtype``.

        Cached results may replace the packing if they belong to the same files; if the
        cache turns out to be invalid, ``load`` is called again.
        """
