"""Running requests that leave this engine, and those of others that continue here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from inl.engine.moved_request import MovedRequest, moved_request
from inl.errors import ProtocolError, RequestError
from inl.kv_transfer.carried import MAX_BYTES
from inl.kv_transfer.spans import Recut, checked_index, transfer_identity

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.engine.dispatcher import RequestDispatcher
    from inl.engine.request_handle import RequestHandle
    from inl.kv_tiers.record import Identity
    from inl.kv_transfer.spans import TokenSpan
    from inl.scheduling.request import Request

log = logging.getLogger("inl")


class RequestMigration:
    """Exports and imports requests of one engine core. Thread-safe.

    identity: what contents of its blocks depend on; ``None`` if they cannot be copied.
    """

    def __init__(
        self,
        core: EngineCore,
        dispatcher: RequestDispatcher,
        identity: Identity | None,
    ) -> None:
        self._core, self._dispatcher = core, dispatcher
        self._layouts = () if identity is None else identity.layouts
        self._identity = "" if identity is None else transfer_identity(identity)
        self._model = core.config.model_digest

    def export(self, handle: RequestHandle) -> MovedRequest:
        """End a request and return what another engine continues it from.

        Raises :class:`~inl.errors.RequestError`.
        """
        if handle.request.embeddings is not None:
            raise RequestError(
                f"request {handle.request.id}: has embeddings in its prompt, accepted: "
                "one of token ids"
            )
        spans = self._dispatcher.lock.run(partial(self._dispatcher.take, handle))
        return moved_request(handle, spans, model=self._model, identity=self._identity)

    def check_model(self, moved: MovedRequest) -> None:
        """Raise :class:`~inl.errors.RequestError` for a request of another model."""
        if moved.model != self._model:
            raise RequestError(
                f"moved request: of the model {moved.model:.16}, accepted: this one, "
                f"{self._model:.16}"
            )

    def restore(self, handle: RequestHandle, moved: MovedRequest) -> None:
        """Give a prepared request what it had generated, and store its blocks.

        Raises :class:`~inl.errors.RequestError` for another adapter or unknown tokens.
        """
        request = handle.request
        if request.adapter_digest != moved.adapter_digest:
            raise RequestError(
                f"moved request: its adapter {moved.options.get('adapter')!r} is "
                "another one here"
            )
        if moved.output_ids:
            self.resume(handle, moved.output_ids, "moved request")
        request.token_logprobs = [each for each in moved.token_logprobs if each]
        if moved.prompt_logprobs:
            request.prompt_token_logprobs = list(moved.prompt_logprobs)
        self.adopt(request, moved.spans, moved.identity)

    def adopt(
        self, request: Request, spans: Sequence[TokenSpan], identity: str
    ) -> None:
        """Let a request that is not added begin with contents of another engine.

        identity: what they depend on beside its tokens. What does not suit is computed
        again.
        """
        if self._layouts and spans and identity == self._identity:
            self._dispatcher.lock.run(partial(self._adopt, request, spans))

    def _adopt(self, request: Request, spans: Sequence[TokenSpan]) -> None:
        """Store contents, or give them to the request; the caller holds the lock."""
        core = self._core
        try:
            if core.has_tiers and not core.carries_state:
                self._store(request, spans)
                return
            if core.config.recurrent and not core.carries_state:
                return
            joined = core.joined_spans()
            for span in spans:
                joined.add(span)
        except ProtocolError as error:
            log.warning("moved request: %s; its tokens are computed again", error)
            return
        state = joined.state(core.most_carried(request))
        if state is not None:
            core.carry([request], state, MAX_BYTES)

    def resume(
        self, handle: RequestHandle, output_ids: Sequence[int], where: str
    ) -> None:
        """Begin a request after generated tokens.

        Raises :class:`~inl.errors.RequestError` for tokens that the model does not
        have.
        """
        vocab = self._core.runner.limits.vocab
        if (highest := max(output_ids)) >= vocab:
            raise RequestError(
                f"{where}: found token {highest}, the vocabulary is 0 to {vocab - 1}"
            )
        handle.resume(output_ids)

    def _store(self, request: Request, spans: Sequence[TokenSpan]) -> None:
        """Store contents of a request's blocks; the caller holds the lock."""
        recuts = [Recut(layout) for layout in self._layouts]
        for span in spans:
            blocks = checked_index(recuts, span.group).add(span)
            self._core.store_blocks(request, span.group, blocks)
