"""Pieces of streamed text, with what else is known of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle
    from inl.scheduling.request import FinishReason
    from inl.scheduling.sampling_params import TokenLogprob


class TokenUsage(NamedTuple):
    """Tokens of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""


class TextPiece(str):
    """A part of a stream's text: a string that also says what its tokens are.

    Only the last piece of a stream has a ``finish_reason``; it may be empty.
    """

    token_ids: tuple[int, ...]
    """Tokens since the piece before; text that is held back follows later."""
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token, if requested."""
    finish_reason: FinishReason | None
    """Why the output has ended, as in a completion; ``None`` while it goes on."""
    usage: TokenUsage
    """Tokens of the whole request so far."""


class PieceReader:
    """Reads the pieces of one request as its handle gets tokens."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._tokens = 0
        """Tokens of all pieces."""
        self._has_ended = False

    def read(self) -> TextPiece | None:
        """Return the text since the last call; ``None`` if there is nothing to say."""
        handle = self._handle
        if self._has_ended:
            return None
        # Read before the text, so that the last one is not lost.
        reason = handle.finish_reason
        text = handle.take()
        self._has_ended = reason is not None
        if handle.error is not None:
            reason = None  # which the stream raises
        if not text and reason is None:
            return None
        start, request = self._tokens, handle.request
        ids = tuple(handle.token_ids[start:])
        stop = self._tokens = start + len(ids)
        piece = TextPiece(text)
        piece.token_ids, piece.finish_reason = ids, reason
        scored = request.logprobs is not None
        piece.logprobs = tuple(request.token_logprobs[start:stop]) if scored else None
        piece.usage = TokenUsage(request.prompt_tokens, stop, request.cached_tokens)
        return piece
