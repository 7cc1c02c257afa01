"""Checkpoint adapter: exposes an older tensor layout under the current names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

from inl.dtypes import HostArray
from inl.errors import CheckpointError
from inl.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from inl.backend.weight_cache import FileIdentity
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

Make = Callable[[Sequence[HostArray]], HostArray]


class Piece(NamedTuple):
    """A logical tensor and the stored tensors that it is built from."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Make | None = None
    """Combines the stored tensors; ``None`` returns the single source unchanged."""


@final
class AdaptedCheckpoint(Checkpoint):
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
        self.path = inner.path
        self.config = inner.config if config is None else config
        specified = inner.eos_token_ids or "eos_token_id" in inner.config
        self.eos_token_ids = inner.eos_token_ids if specified else eos
        self._inner, self._pieces = inner, dict(pieces)

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

    def files(self) -> Sequence[Path]:
        return self._inner.files()

    def identities(self) -> Mapping[Path, FileIdentity]:
        return self._inner.identities()

    def tokenizer(self) -> Tokenizer:
        return self._inner.tokenizer()

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._inner.chat_template

    def close(self) -> None:
        self._inner.close()

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise self.missing(name)
        return self._pieces[name]
