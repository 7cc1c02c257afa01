"""One step of a model: the thing that is compiled, one program per bucket."""

from __future__ import annotations

from typing import Any

from inl.ops.protocol import Ops
from inl.spec.cache import State
from inl.spec.model import Model
from inl.spec.step import Array, Step


def forward(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, state: State
) -> tuple[Array, Step, State]:
    """Read the message and compute the sampled tokens' logits [S, V]."""
    step, tables = ops.make_step(
        message, state.tables, bucket=ops.bucket, block_size=ops.block_size
    )
    step = step._replace(plan=ops.plan(step, block_size=ops.block_size))
    state = state._replace(tables=tables)
    sampled_step = prune_last_layer(ops, model, step)
    carry = model.embed(ops, config, weights, step)
    last = len(weights.layers) - 1
    for index, w in enumerate(weights.layers):
        more = {"sampled_step": sampled_step} if sampled_step and index == last else {}
        carry, state = model.layer(
            ops, config, w, carry, step, state, index=index, **more
        )
    return model.head(ops, config, weights, carry, sampled_step or step), step, state


def prune_last_layer(ops: Ops, model: Model, step: Step) -> Step | None:
    """The step of the last layer, where fewer tokens are sampled than computed.

    Not where several are sampled of a row: kernels may take a row's tokens for its
    last ones, and of a row that has fewer one is sampled twice.
    """
    bucket = ops.bucket
    if (
        bucket.tokens_per_row > 1
        or bucket.rows >= bucket.tokens
        or not model.prunes_last_layer
    ):
        return None
    sampled: Step = ops.prune_last_layer(step)
    return sampled._replace(plan=ops.plan(sampled, block_size=ops.block_size))


def advance(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, state: State
) -> tuple[Any, State]:
    """Compute one step and choose its tokens, see :func:`sample`."""
    logits, step, state = forward(ops, model, config, weights, message, state)
    return sample(ops, logits, step, state)


def sample(
    ops: Ops, logits: Array, step: Step, state: State, *, scored: Array | None = None
) -> tuple[Any, State]:
    """Choose tokens, int32 [S], and remember each row's last.

    A "sample_filtered" program returns a pair: tokens and their
    :class:`~inl.spec.step.Scores`, of the logits ``scored`` where ``logits`` are masked.
    """
    sampler = ops.bucket.sampler
    tokens, tables = ops.sample(logits, step, state.tables, sampler=sampler)
    state = state._replace(tables=tables)
    if sampler != "sample_filtered":
        return tokens, state
    return (tokens, ops.score(logits if scored is None else scored, tokens)), state
