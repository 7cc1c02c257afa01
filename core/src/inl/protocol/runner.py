"""The seam of the runtime: whoever computes steps, here or in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from inl.spec.limits import Limits as Limits
from inl.spec.step import Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.message import IntArray


class Reply(NamedTuple):
    """What the oldest step in flight chose."""

    step: int
    tokens: NDArray[np.int32]
    """[R, W]; rows beyond those used hold anything."""
    accepted: NDArray[np.int32]
    """[R] tokens of the row that count: 1 without speculation."""
    scores: Scores | None = None
    """Of the R * W tokens, NumPy arrays; only "sample_filtered" programs tell them."""


class Runner(ABC):
    """Computes steps in order. One caller, one thread."""

    limits: Limits

    @abstractmethod
    def submit(self, message: IntArray) -> None:
        """Queue a frame; never waits for the device.

        At most ``limits.depth`` steps may be in flight; admissions and releases do
        not count. Raises :class:`~inl.errors.ProtocolError`, and
        :class:`~inl.errors.OutOfMemory` for a step that it did not begin: the rows of
        that step are lost, and it serves all others as before.
        """

    @abstractmethod
    def sample(self, step: int, masks: IntArray) -> None:
        """Give the token masks of a step whose message had the MASKED flag.

        ``masks``: int32 [R, ceil(V / 32)], bit ``t % 32`` of word ``t // 32`` set
        where token t is allowed.
        """

    @abstractmethod
    def collect(self) -> Reply:
        """Wait for the oldest step in flight."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; closing twice is allowed."""
