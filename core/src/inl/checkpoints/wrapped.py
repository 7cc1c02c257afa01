"""Base class of checkpoints that present another one's tensors differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, final

from inl.checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from inl.backend.weight_cache import FileIdentity
    from inl.dtypes import HostArray
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


class WrappedCheckpoint(Checkpoint):
    """Has the files, config and texts of ``inner``; a child presents its tensors."""

    def __init__(self, inner: Checkpoint) -> None:
        self.path, self.config = inner.path, inner.config
        self.eos_token_ids, self.notes = inner.eos_token_ids, inner.notes
        self.metadata, self._inner = inner.metadata, inner
        self.generation_config = inner.generation_config
        self.cache_scheme = inner.cache_scheme
        self.special_tokens = inner.special_tokens

    def stored_name(self, name: str) -> str:
        return self._inner.stored_name(name)

    def rounded(self, decoded: str) -> Checkpoint:
        changed = copy(self)
        changed._inner = self._inner.rounded(decoded)
        changed.notes = changed._inner.notes
        return changed

    def files(self) -> Sequence[Path]:
        return self._inner.files()

    def identities(self) -> Mapping[Path, FileIdentity]:
        return self._inner.identities()

    def tokenizer(self) -> Tokenizer:
        return self._inner.tokenizer()

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._inner.chat_template

    @property
    def image_processor(self) -> Mapping[str, Any]:
        return self._inner.image_processor

    def close(self) -> None:
        self._inner.close()


@final
class CachedCheckpoint(WrappedCheckpoint):
    """Keeps the tensors it has read, for several ranks that take parts of them."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self._read: dict[str, HostArray] = {}

    def names(self) -> list[str]:
        return self._inner.names()

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._inner.spec(name)

    def tensor(self, name: str) -> HostArray:
        if name not in self._read:
            self._read[name] = self._inner.tensor(name)
        return self._read[name]

    def rows(self, name: str, start: int, stop: int) -> HostArray:
        return self._inner.rows(name, start, stop)
