"""A row for each sequence of tokens: a hidden state of length 1, or of an encoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from inl.spec.encoder import Pooling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.engine.dispatcher import RequestDispatcher
    from inl.engine.encoder_queue import EncoderQueue
    from inl.scheduling.plan import Plan
    from inl.spec.encoder import TokenSequence


@dataclass(slots=True, eq=False)
class PooledRequest(Request):
    """A request whose result is the hidden state of its last token, or a mean.

    With ``pools_all`` the mean of all, of the means that each of its steps returns.
    """

    hidden: NDArray[np.float32] | None = field(init=False, default=None, repr=False)
    """[H], once its last token has been computed."""
    total: NDArray[np.float64] | None = field(init=False, default=None, repr=False)
    """[H], the sum over the tokens that have been computed, with ``pools_all``."""

    def __post_init__(self) -> None:
        self.pooled = True
        Request.__post_init__(self)

    def keep(self, start: int, stop: int, row: NDArray[np.float32]) -> None:
        """Take the row [H] of the step that computes the tokens start .. stop - 1."""
        if self.pools_all:
            own = row.astype(np.float64) * (stop - start)
            # A preempted request begins again.
            self.total = own if start == 0 or self.total is None else self.total + own
        if stop == len(self.tokens):
            if self.total is not None:
                row = np.asarray(self.total / stop, np.float32)
            self.hidden = row


def embedding_request(
    name: str, tokens: Sequence[int], *, context: int, vocab: int, kind: str = "last"
) -> PooledRequest:
    """Return the request for the hidden state of a sequence.

    name: of the sequence in error messages. context: maximum number of tokens. kind:
    one of :data:`inl.ops.pool.POOLINGS`, the "first" state depends on that token only,
    as attention is causal. Raises
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
    if kind == "first":
        ids = ids[:1]
    return PooledRequest(ids, pools_all=kind == "mean")


def keep_hidden(plan: Plan, rows: Sequence[NDArray[np.float32]]) -> None:
    """Give the hidden states of a step, one per chunk, to its requests."""
    for (request, start, stop, _), row in zip(plan.chunks, rows, strict=True):
        is_finished = request.status is Status.FINISHED
        if not is_finished and isinstance(request, PooledRequest):
            request.keep(start, stop, row)


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
    without one, a row is of hidden states after the last layer. pooling: returns of
    which, and whether it has length 1.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, queue: EncoderQueue | None, *,
        context: int, vocab: int, pooling: Callable[[], Pooling],
    ) -> None:  # fmt: skip
        self._dispatcher, self._queue, self._pooling = dispatcher, queue, pooling
        self._context, self._vocab = context, vocab

    def rows(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Return the row [H] of each sequence, or [labels] of an encoder with a head.

        Raises :class:`~inl.errors.RequestError` before anything is computed.
        """
        pooling = Pooling("last") if self._queue is not None else self._pooling()
        request_for = partial(
            embedding_request, context=self._context, vocab=self._vocab,
            kind=pooling.kind,
        )  # fmt: skip
        requests = [
            request_for(_name(index), tokens)
            for index, (tokens, _) in enumerate(sequences)
        ]
        if self._queue is not None:
            return self._queue.encode(sequences)
        rows = self._hidden_rows(requests)
        if not pooling.unit:
            return rows
        return [unit_length(_name(at), row) for at, row in enumerate(rows)]

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
        for handle, request in zip(handles, requests, strict=True):
            handle.completion()  # raises its error
            assert request.hidden is not None, "it has finished"
            rows.append(request.hidden)
        return rows


def _name(index: int) -> str:
    """Return the name of a sequence in error messages."""
    return f"prompts[{index}]"
