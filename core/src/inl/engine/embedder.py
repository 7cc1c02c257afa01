"""Embeddings of texts: the last hidden state of a model, of length 1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import widen
from inl.errors import RequestError
from inl.executor.hidden_states import hidden_runner
from inl.scheduling.buckets import Buckets
from inl.scheduling.token_ids import read_token_ids
from inl.spec.message import Row, admit_frame, step_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.executor.local_runner import LocalRunner
    from inl.protocol.runner import Runner

RunLocked = Callable[[Callable[[], Any]], Any]
"""Calls a function while no step is computed."""


class Embedder:
    """Computes embeddings on the weights of a runner, in chunks between its steps.

    locked: calls a function while no step is computed. context: maximum number of
    tokens. budget: most tokens of a chunk. Thread-safe, for one sequence at a time.
    """

    def __init__(
        self, runner: Runner, locked: RunLocked, *, context: int, budget: int
    ) -> None:
        self._parent, self._locked = runner, locked
        self._context, self._budget = context, budget
        self._lock = threading.Lock()
        self._runner: LocalRunner | None = None
        self._steps = 0

    def embed(self, name: str, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding of a sequence, float32 [H] of length 1.

        name: of the sequence in error messages. Raises
        :class:`~inl.errors.RequestError` for ids that the model does not have, too many
        tokens, and an engine that is not on one device of this process.
        """
        ids, array = read_token_ids(name, tokens)
        if not 0 < len(ids) <= self._context:
            raise RequestError(
                f"{name}: found {len(ids)} tokens, accepts 1 to {self._context}"
            )
        vocab = self._parent.limits.vocab
        if int(array.max()) >= vocab:
            raise RequestError(
                f"{name}: found token id {array.max()}, accepts 0 to {vocab - 1}"
            )
        with self._lock:
            try:
                return self._computed(name, ids)
            except BaseException:
                # Its slot may hold a part of the sequence.
                self._locked(self._free)
                raise

    def _computed(self, name: str, ids: list[int]) -> NDArray[np.float32]:
        runner = self._locked(self._opened)
        sizes = Buckets(runner.limits, token_budget=self._budget, max_rows=1)
        self._locked(partial(self._admit, runner))
        for start in range(0, len(ids), sizes.tokens):
            part = ids[start : start + sizes.tokens]
            state = self._locked(partial(self._step, runner, sizes, part))
        row = widen(state)[0].astype(np.float64)
        length = float(np.sqrt(np.square(row).sum()))
        if not np.isfinite(length) or not length:
            raise RequestError(
                f"{name}: found a hidden state of length {length}; needs a finite one"
            )
        return np.asarray(row / length, np.float32)

    def _opened(self) -> LocalRunner:
        if self._runner is None:
            self._runner = hidden_runner(self._parent, self._context)
        return self._runner

    def _admit(self, runner: LocalRunner) -> None:
        limits = runner.limits
        blocks = [list(range(1, 1 + limits.max_blocks_per_seq))] * limits.groups
        width = limits.max_blocks_per_seq
        runner.submit(
            admit_frame(1, blocks, groups=limits.groups, max_blocks_per_seq=width)
        )

    def _step(self, runner: LocalRunner, sizes: Buckets, part: list[int]) -> Any:
        self._steps += 1
        limits = runner.limits
        frame = step_frame(
            sizes.choose(len(part), 1, "greedy"),
            [Row(1, part)],
            step=self._steps,
            groups=limits.groups,
            block_size=limits.block_size,
            decode_rows=0,
        )
        return runner.logits(frame)

    def _free(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def close(self) -> None:
        """Free the cache; no step may be computed meanwhile."""
        self._free()
