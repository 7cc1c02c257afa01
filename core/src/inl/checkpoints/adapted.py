"""Checkpoint adapter: exposes an older tensor layout under the current names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.checkpoints.wrapped import WrappedCheckpoint
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint

Make = Callable[[Sequence[HostArray]], HostArray]


class Piece(NamedTuple):
    """A logical tensor and the stored tensors that it is built from."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Make | None = None
    """Combines the stored tensors; ``None`` returns the single source unchanged."""


class AdaptedCheckpoint(WrappedCheckpoint):
    """Wraps a checkpoint and renames or combines its tensors as ``pieces`` describes.

    Tensors are read on access; one that is combined from several sources is a copy.
    eos: end-of-text ids if the config has no ``eos_token_id`` key (null counts as one).
    config: replaces the config of ``inner``.
    """

    def __init__(
        self,
        inner: Checkpoint,
        pieces: Mapping[str, Piece],
        *,
        eos: tuple[int, ...] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(inner)
        self._pieces = dict(pieces)
        if config is not None:
            self.config = config
        if not inner.eos_token_ids and "eos_token_id" not in inner.config:
            self.eos_token_ids = eos

    def names(self) -> list[str]:
        return list(self._pieces)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        piece = self._piece(name)
        dtype, _ = self._inner.spec(piece.sources[0])
        return dtype, piece.shape

    def tensor(self, name: str) -> HostArray:
        piece = self._piece(name)
        stored = [self._inner.tensor(source) for source in piece.sources]
        if piece.make is None:
            return stored[0]
        dtypes = sorted({array.dtype for array in stored})
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: combines {', '.join(piece.sources)}, "
                f"found dtypes {' and '.join(dtypes)}; accepted: one dtype"
            )
        return piece.make(stored)

    def stored_name(self, name: str) -> str:
        return self._inner.stored_name(self._piece(name).sources[0])

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise self.missing(name)
        return self._pieces[name]
