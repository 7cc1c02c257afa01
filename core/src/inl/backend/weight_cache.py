"""Weights that a backend keeps, laid out, from one start to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class WeightCache(ABC):
    """A capability: a backend that need not lay out the same weights twice."""

    @abstractmethod
    def load(self, files: Sequence[Path], dtype: str, load: Callable[[], T]) -> T:
        """Call ``load``, which lays out all weights of ``files`` for ``dtype``.

        What was kept may be taken in the place of the work, if it is the same.
        ``load`` is called again where that turns out otherwise.
        """
