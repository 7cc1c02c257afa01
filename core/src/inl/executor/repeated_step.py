"""Several decoding steps as one program: a loop that the device runs.

The frame of each step is made on the device from the frame of the repeated step. It is
an ordinary frame of decoding rows: those that still run come first, and the rest is
padding, so that kernels need to know nothing of repetition. The functions here use what
NumPy and ``jax.numpy`` have in common, and run on the arrays of the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from inl.executor.model_step import forward
from inl.spec.message import (
    FEEDBACK,
    HEADER,
    HEADER_WORD,
    ROW_WORD,
    layout,
    repeated_uniforms,
    row_words,
    steps_word,
    stop_words,
)
from inl.spec.step import NO_TOKEN, Array, Bucket

if TYPE_CHECKING:
    from inl.backend.provisional import DeviceLoops
    from inl.ops.protocol import Ops
    from inl.spec.cache import State
    from inl.spec.model import Model


class Progress(NamedTuple):
    """What the steps so far have computed, and the frame of the next one."""

    frame: Array
    """[words] frame of the next step."""
    place: Array
    """[R] row of that frame for each row of the message."""
    running: Array
    """[R] whether each row of the message computes the next step."""
    step: Array
    """[] steps computed."""
    tokens: Array
    """[R, N] sampled tokens, :data:`~inl.spec.step.NO_TOKEN` elsewhere."""


def advance_repeated(
    ops: Ops,
    model: Model,
    config: Any,
    weights: Any,
    message: Array,
    state: State,
    *,
    loops: DeviceLoops,
    table_width: int | None = None,
) -> tuple[Array, State]:
    """Compute a repeated step until its rows have stopped.

    message: a frame of ``ops.bucket``, see :mod:`inl.spec.message`. table_width: as in
    :func:`~inl.executor.model_step.forward`. Returns the tokens, int32 [R * N], and the
    state.
    """
    frames = Frames(loops.arrays, ops.bucket, message, state, ops.block_size)

    def advance(value: tuple[Progress, State]) -> tuple[Progress, State]:
        progress, state = value
        logits, step, state = forward(
            ops, model, config, weights, progress.frame, state, table_width=table_width
        )
        sampler = ops.bucket.sampler
        tokens, tables = ops.sample(logits, step, state.tables, sampler=sampler)
        return frames.following(progress, tokens), state._replace(tables=tables)

    first = frames.first(state)
    progress, state = loops.while_loop(_has_rows, advance, (first, state))
    return progress.tokens.reshape(-1), state


def _has_rows(value: tuple[Progress, State]) -> Array:
    return value[0].running.any()


class Frames:
    """Makes the frames of the steps of a repeated step.

    arrays: module with NumPy's functions on the backend's arrays.
    """

    def __init__(
        self,
        arrays: Any,
        bucket: Bucket,
        message: Array,
        state: State,
        block_size: int,
    ) -> None:
        groups = state.tables.blocks.shape[0]
        place = layout(bucket, groups=groups, block_size=block_size)
        rows = message[place.rows : place.updates]
        self._arrays, self._bucket = arrays, bucket
        self._message, self._place = message, place
        self._rows = rows = rows.reshape(bucket.rows, row_words(bucket))
        self._given = message[place.tokens : place.size]
        self._steps, self._stops = rows[:, steps_word(bucket)], stop_words(bucket)

    def first(self, state: State) -> Progress:
        """Return the state before the first step."""
        xp, bucket = self._arrays, self._bucket
        last = state.tables.last[self._rows[:, ROW_WORD.slot]]
        stopped = (self._given == FEEDBACK[0]) & self._is_stop(last)
        running = (self._steps > 0) & ~stopped
        tokens = xp.full((bucket.rows, bucket.repeat), NO_TOKEN, dtype="int32")
        step = xp.zeros((), dtype="int32")
        return self._progress(running, step, tokens, self._given)

    def following(self, progress: Progress, sampled: Array) -> Progress:
        """Return the state after a step.

        sampled: int32 [R], by row of the step's frame.
        """
        xp, bucket, step = self._arrays, self._bucket, progress.step
        newest = sampled[progress.place]
        columns = xp.arange(bucket.repeat, dtype="int32") == step
        written = progress.running[:, None] & columns[None]
        tokens = xp.where(written, newest[:, None], progress.tokens)
        stopped = (newest < 0) | self._is_stop(newest)
        running = progress.running & ~stopped & (self._steps > step + 1)
        fed_back = xp.full((bucket.rows,), FEEDBACK[0], dtype="int32")
        return self._progress(running, step + 1, tokens, fed_back)

    def _is_stop(self, tokens: Array) -> Array:
        """Whether the token of each row is one of its stop ids: [R]."""
        return (self._rows[:, self._stops] == tokens[:, None] + 1).any(1)

    def _progress(
        self, running: Array, step: Array, tokens: Array, inputs: Array
    ) -> Progress:
        xp, rows = self._arrays, self._bucket.rows
        count = running.sum(dtype="int32")
        index = xp.arange(rows, dtype="int32")
        behind = count + xp.cumsum(~running, dtype="int32") - 1
        place = xp.where(running, xp.cumsum(running, dtype="int32") - 1, behind)
        # The inverse permutation.
        order = xp.where(place[None] == index[:, None], index[None], 0)
        order = order.sum(1, dtype="int32")
        used = index < count
        frame = self._frame(order, used, count, step, inputs)
        return Progress(frame, place, running, step, tokens)

    def _frame(
        self, order: Array, used: Array, count: Array, step: Array, inputs: Array
    ) -> Array:
        xp, message, place = self._arrays, self._message, self._place
        counts = xp.full((3,), 1, dtype="int32") * count
        columns = xp.arange(self._bucket.repeat, dtype="int32") == step
        uniforms = self._rows[:, repeated_uniforms(self._bucket)]
        number = xp.where(columns[None], uniforms, 0).sum(1, dtype="int32")
        at = ROW_WORD.uniforms
        rows = xp.concatenate(
            [self._rows[:, :at], number[:, None], self._rows[:, at + 1 :]], axis=1
        )
        return xp.concatenate([
            message[: HEADER_WORD.decode_rows],
            counts,
            message[HEADER_WORD.used_updates : HEADER],
            xp.where(used[:, None], rows[order], 0).reshape(-1),
            message[place.updates : place.tokens],
            xp.where(used, inputs[order], 0),
        ])  # fmt: skip
