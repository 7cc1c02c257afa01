"""The runner of an encoder in this process: sequences, and no steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inl.backend.base import CachedMemory
from inl.errors import ProtocolError
from inl.executor.encoder_executor import EncoderExecutor
from inl.protocol.runner import Reply, Runner
from inl.spec.encoder import TokenSequence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.message import IntArray


class EncoderRunner(Runner):
    """Encodes sequences on a backend. Not thread-safe."""

    def __init__(self, executor: EncoderExecutor) -> None:
        self.executor, self.limits = executor, executor.limits
        self._closed = False

    @property
    def loaded(self) -> Any:
        """The model that is computed; without weights once closed."""
        return self.executor.loaded

    def encode(self, sequences: Sequence[TokenSequence]) -> NDArray[np.float32]:
        if self._closed:
            raise ProtocolError("runner: is closed; create another")
        return self.executor.encode(sequences)

    def submit(self, message: IntArray) -> None:  # noqa: ARG002
        raise ProtocolError("an encoder takes sequences, found a frame of a step")

    def sample(self, step: int, masks: IntArray) -> None:  # noqa: ARG002
        raise ProtocolError("an encoder takes sequences, found masks of a step")

    def collect(self) -> Reply:
        raise ProtocolError("collect: no step is in flight")

    def reset(self) -> None:
        """Do nothing: no state outlives a call."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.executor.release()
        if (cached := self.executor.backend.offers(CachedMemory)) is not None:
            cached.release()
