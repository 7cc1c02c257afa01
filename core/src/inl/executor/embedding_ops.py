"""Ops of a step in which embeddings take the place of some tokens' table rows."""

from __future__ import annotations

from typing import Any

from inl.spec.embedded_rows import EmbeddedRows
from inl.spec.step import Array


class EmbeddingOps:
    """Replaces rows of ``embedding``; passes all other ops on."""

    def __init__(self, ops: Any, embedded: EmbeddedRows) -> None:
        self._ops, self._embedded = ops, embedded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def embedding(self, tokens: Array, w: Any) -> Array:
        """Compute :data:`inl.ops.embedding.embedding`, and replace the rows."""
        looked_up = self._ops.embedding(tokens, w)
        return looked_up * self._embedded.kept + self._embedded.rows
