"""A row for each sequence of tokens: a hidden state of length 1, or of an encoder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from inl.engine.batch import Batch
from inl.engine.cleanup import run_with_cleanup
from inl.engine.request_handle import RequestHandle
from inl.errors import RequestError
from inl.scheduling.request import Request, Status
from inl.scheduling.token_ids import read_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.engine.dispatcher import RequestDispatcher
    from inl.engine.encoder_queue import EncoderQueue
    from inl.scheduling.plan import Plan
    from inl.spec.encoder import TokenSequence


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


class Embedder:
    """Computes a row for each sequence, in turns with the steps that generate.

    context: maximum number of tokens. vocab: number of token ids. queue: of an encoder;
    without one, a row is the hidden state after the last token.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, queue: EncoderQueue | None, *,
        context: int, vocab: int,
    ) -> None:  # fmt: skip
        self._dispatcher, self._queue = dispatcher, queue
        self._context, self._vocab = context, vocab

    def rows(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Return the row [H] of each sequence, or [labels] of an encoder with a head.

        Raises :class:`~inl.errors.RequestError` before anything is computed.
        """
        requests = [
            embedding_request(
                _name(index), tokens, context=self._context, vocab=self._vocab
            )
            for index, (tokens, _) in enumerate(sequences)
        ]
        if self._queue is not None:
            return self._queue.encode(sequences)
        return self._hidden_rows(requests)

    def _hidden_rows(
        self, requests: Sequence[PooledRequest]
    ) -> list[NDArray[np.float32]]:
        batch, started = Batch(), time.perf_counter()
        for request in requests:
            batch.add(RequestHandle(request, None, (), started))
        handles = list(batch.handles)
        run_with_cleanup(
            partial(self._dispatcher.complete, batch),
            partial(self._dispatcher.cancel, handles),
        )
        rows = []
        for index, (handle, request) in enumerate(zip(handles, requests, strict=True)):
            handle.completion()  # raises its error
            assert request.hidden is not None, "it has finished"
            rows.append(unit_length(_name(index), request.hidden))
        return rows


def _name(index: int) -> str:
    """Return the name of a sequence in error messages."""
    return f"prompts[{index}]"
