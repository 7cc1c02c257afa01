"""Requests that leave an engine for another one, with what their caches hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.engine.state_port import StatePort, take_contents
from inl.errors import InlError
from inl.serve.frontends.moving import Moving
from inl.workers.settings import parse_address, show_address

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.request_handle import RequestHandle
    from inl.kv_transfer.spans import SequenceContents

log = logging.getLogger("inl.serve")


class EngineMoving(Moving):
    """Moves requests of one engine, over a port of its own. Used by one event loop.

    host: where it listens for those who take them. secret: that engines know.
    """

    def __init__(self, host: str, secret: bytes | None) -> None:
        self._host, self._secret = host, secret
        self._port: StatePort | None = None

    async def export(
        self, engine: InferenceEngine, handle: RequestHandle
    ) -> tuple[int, str]:
        moved = await asyncio.to_thread(engine.export_request, handle)
        try:
            if self._port is None:
                self._port = StatePort(show_address(self._host, 0), self._secret)
        except InlError as error:
            log.warning("moved requests are computed again: %s", error)
            return 0, ""
        ticket = self._port.hold(moved)
        return parse_address(self._port.address)[1], ticket

    async def take(
        self, address: str, ticket: str, tokens: Sequence[int]
    ) -> SequenceContents | None:
        try:
            return await asyncio.to_thread(
                take_contents, address, self._secret, ticket, tokens
            )
        except (OSError, InlError) as error:
            log.info("the tokens of a moved request are computed again: %s", error)
            return None

    @property
    def is_awaited(self) -> bool:
        """Whether contents wait to be taken."""
        return self._port is not None and self._port.is_awaited

    def close(self) -> None:
        """Stop listening. Closing twice is allowed."""
        if self._port is not None:
            self._port.close()
