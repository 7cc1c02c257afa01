"""Which drafted tokens a row of a planned step may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.scheduling.guide import restore

if TYPE_CHECKING:
    from inl.scheduling.plan import Chunk
    from inl.scheduling.request import Request


def most_drafts(chunk: Chunk, limit: int) -> int:
    """Return the most drafts that a row may have; limit: of any row."""
    request, _, stop, _ = chunk
    if stop < request.host_token_count:
        return 0
    # Together they may allow nothing after a draft that each of them allows.
    if request.guide is not None and request.token_mask is not None:
        return 0
    left = request.max_scheduled - stop
    return max(min(limit, left, 2 * limit - request.uncertain), 0)


def known_tokens(chunk: Chunk) -> int:
    """Return the predicted tokens that the row's first draft comes after."""
    return chunk.start + 1 - len(chunk.request.tokens)


def allowed(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """Return the predicted tokens up to the first that a grammar refuses."""
    guide = request.guide
    if guide is None:
        return tokens
    try:
        return tokens[: guide.accepts(tokens)]
    except RequestError:  # too complex after these tokens, which may be wrong
        restore(guide, request.output_ids)
        return ()
