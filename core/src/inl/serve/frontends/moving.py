"""Requests that leave an engine for another one, with what their caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.request_handle import RequestHandle
    from inl.kv_transfer.spans import SequenceContents


class Moving(Protocol):
    """Exports requests to other engines, and imports the cache contents of theirs."""

    async def export(
        self, engine: InferenceEngine, handle: RequestHandle
    ) -> tuple[int, str]:
        """End a request; returns the port and the ticket of its contents.

        The ticket is "" without any. Raises :class:`~inl.errors.RequestError` for one
        that has finished, or cannot be moved.
        """

    async def take(
        self, address: str, ticket: str, tokens: Sequence[int]
    ) -> SequenceContents | None:
        """Take contents of a request with these tokens; ``None`` if that fails."""
