"""Embeddings of texts: the hidden state of the last token, of length 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from inl.errors import RequestError
from inl.scheduling.request import Request, Status
from inl.scheduling.token_ids import read_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.scheduling.plan import Plan


@dataclass(slots=True, eq=False)
class PooledRequest(Request):
    """A request whose result is the hidden state of its last token."""

    hidden: NDArray[np.float32] | None = field(init=False, default=None, repr=False)
    """[H], once its last token has been computed."""

    def __post_init__(self) -> None:
        self.pooled = True
        Request.__post_init__(self)


def embedding_request(
    name: str, tokens: Sequence[int], *, context: int, vocab: int
) -> PooledRequest:
    """Return the request for the hidden state of a sequence.

    name: of the sequence in error messages. context: maximum number of tokens. Raises
    :class:`~inl.errors.RequestError` for ids that the model does not have, and too many
    tokens.
    """
    ids, array = read_token_ids(name, tokens)
    if not 0 < len(ids) <= context:
        raise RequestError(f"{name}: found {len(ids)} tokens, accepts 1 to {context}")
    if int(array.max()) >= vocab:
        raise RequestError(
            f"{name}: found token id {array.max()}, accepts 0 to {vocab - 1}"
        )
    return PooledRequest(ids)


def keep_hidden(plan: Plan, rows: Sequence[NDArray[np.float32]]) -> None:
    """Give the hidden states of a step, one per chunk, to requests that end in it."""
    for (request, _, stop, _), row in zip(plan.chunks, rows, strict=True):
        is_last = stop == len(request.tokens) and request.status is not Status.FINISHED
        if is_last and isinstance(request, PooledRequest):
            request.hidden = row


def unit_length(name: str, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a hidden state [H] with length 1.

    Raises :class:`~inl.errors.RequestError` for one of no length or an infinite one.
    """
    row = hidden.astype(np.float64)
    length = float(np.sqrt(np.square(row).sum()))
    if not np.isfinite(length) or not length:
        raise RequestError(
            f"{name}: found a hidden state of length {length}; needs a finite one"
        )
    return np.asarray(row / length, np.float32)
