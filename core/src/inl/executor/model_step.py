"""One step of a model: the functions that are compiled, one program per bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from inl.adapters.ops import adapter_ops
from inl.adapters.weights import AdaptedWeights
from inl.executor.draft_state import RecurrentOps
from inl.executor.embedding_ops import EmbeddingOps
from inl.spec.cache import State
from inl.spec.embedded_rows import EmbeddedRows
from inl.spec.model import Model, is_recurrent
from inl.spec.scored_tokens import split_next
from inl.spec.step import Array, Scores, Step, Tables

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SCORED_TOKENS: Final = 128
"""Tokens whose logits a step that scores its own tokens computes at once."""


def forward(
    ops: Ops,
    model: Model,
    config: Any,
    weights: Any,
    message: Array,
    state: State,
    *,
    table_width: int | None = None,
    embedded: EmbeddedRows | None = None,
) -> tuple[Array, Step, State]:
    """Decode the message and compute the logits [S, V] of the sampled tokens.

    table_width: columns of the block tables that the step reads; ``None`` is all.
    embedded: inputs of tokens beside their ids. Returns the logits, the step's arrays
    and the state.
    """
    step, state = begin(ops, message, state, table_width)
    if embedded is not None:
        ops = cast("Ops", EmbeddingOps(ops, embedded, step, model.inputs(config)))
    sampled_step = prune_last_layer(ops, model, step)
    if isinstance(weights, AdaptedWeights):
        ops = adapter_ops(ops, weights, step, sampled_step)
        weights = weights.model
    features = None if embedded is None else embedded.features
    carry, state = layers(
        ops, model, config, weights, step, sampled_step, state, features
    )
    logits = model.head(ops, config, weights, carry, sampled_step or step)
    if model.vocab_size is not None:
        logits = logits[:, : model.vocab_size]
    return logits, step, state


def begin(
    ops: Ops, message: Array, state: State, table_width: int | None
) -> tuple[Step, State]:
    """Decode the message; returns the step's arrays and the state."""
    step, tables = ops.make_step(
        message, state.tables, bucket=ops.bucket, block_size=ops.block_size
    )
    if table_width is not None:
        step = step._replace(blocks=step.blocks[:, :, :table_width])
    step = step._replace(plan=ops.plan(step, block_size=ops.block_size))
    return step, state._replace(tables=tables)


def layers(
    ops: Ops,
    model: Model,
    config: Any,
    weights: Any,
    step: Step,
    sampled_step: Step | None,
    state: State,
    features: Array | None = None,
) -> tuple[Any, State]:
    """Compute all layers; returns what the head reads, and the state.

    features: [F, T, H], added after the layers that the model names.
    """
    carry = model.embed(ops, config, weights, step)
    last = len(weights.layers) - 1
    layers = () if features is None else model.inputs(config).feature_layers
    for index, w in enumerate(weights.layers):
        pruned = index == last and sampled_step is not None
        options = {"sampled_step": sampled_step} if pruned else {}
        carry, state = model.layer(
            ops, config, w, carry, step, state, index=index, **options
        )
        if index in layers:
            assert features is not None, "the model takes features"
            added = features[layers.index(index)]
            if pruned:
                added = ops.take_rows(added, step.samples)
            held: Any = carry
            carry = held._replace(residual=held.residual + added)
    return carry, state


def prune_last_layer(ops: Ops, model: Model, step: Step) -> Step | None:
    """Return the last layer's step if fewer tokens are sampled than computed.

    Returns ``None`` for buckets with several sampled tokens per row: kernels may
    assume that a row's tokens are its last ones, and a row with fewer tokens than
    samples has one of them twice.
    """
    bucket = ops.bucket
    if (
        bucket.tokens_per_row > 1
        or bucket.rows >= bucket.tokens
        or not model.prunes_last_layer
    ):
        return None
    pruned: Step = ops.prune_last_layer(step)
    return pruned._replace(plan=ops.plan(pruned, block_size=ops.block_size))


def advance(
    ops: Ops,
    model: Model,
    config: Any,
    weights: Any,
    message: Array,
    state: State,
    *,
    table_width: int | None = None,
) -> tuple[Any, State]:
    """Compute one step and sample its tokens, see :func:`forward`, :func:`sample`."""
    recurrent = None
    if ops.bucket.verifies and is_recurrent(model, config):
        recurrent = RecurrentOps(ops)
    logits, step, state = forward(
        cast("Ops", recurrent or ops), model, config, weights, message, state,
        table_width=table_width,
    )  # fmt: skip
    found, state = sample(ops, logits, step, state)
    if recurrent is not None:
        kept = found[0] if ops.bucket.sampler == "sample_filtered" else found
        state = recurrent.committed(kept, step, state)
    return found, state


def pool(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, state: State,
    **options: Any,
) -> tuple[Array, State]:  # fmt: skip
    """Compute the hidden states [R, H] of the rows' last tokens.

    model: ends before its last product, see :mod:`inl.executor.hidden_states`.
    """
    hidden, _, state = forward(ops, model, config, weights, message, state, **options)
    return hidden, state


def pool_mean(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, state: State,
    *, table_width: int | None = None,
) -> tuple[Array, State]:  # fmt: skip
    """Compute the mean [R, H] of the hidden states of each row's tokens in the step.

    model: see :func:`pool`; its head returns those of all tokens.
    """
    step, state = begin(ops, message, state, table_width)
    layer_ops = ops
    if isinstance(weights, AdaptedWeights):  # of layers, not of the head
        layer_ops, weights = adapter_ops(ops, weights, step, None), weights.model
    carry, state = layers(layer_ops, model, config, weights, step, None, state)
    hidden = model.head(ops, config, weights, carry, step)
    return ops.pool(hidden, step.starts, kind="mean"), state


def score(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, state: State,
    *, table_width: int | None = None,
) -> tuple[list[Scores], State]:  # fmt: skip
    """Compute the scores of the token after each one of a step.

    The logits of SCORED_TOKENS are in memory at once. message: see
    :func:`inl.spec.scored_tokens.with_next`. Returns the scores of each such part.
    """
    bucket = ops.bucket
    frame, following, indices = split_next(message, bucket)
    step, state = begin(ops, frame, state, table_width)
    layer_ops = ops
    if isinstance(weights, AdaptedWeights):  # of layers, not of the head
        layer_ops, weights = adapter_ops(ops, weights, step, None), weights.model
    carry, state = layers(layer_ops, model, config, weights, step, None, state)
    scores: list[Scores] = []
    for start in range(0, bucket.tokens, SCORED_TOKENS):
        stop = min(start + SCORED_TOKENS, bucket.tokens)
        part = step._replace(samples=indices[start:stop])
        logits = model.head(ops, config, weights, carry, part)
        if model.vocab_size is not None:
            logits = logits[:, : model.vocab_size]
        scores.append(ops.score(logits, following[start:stop]))
    return scores, state


def forward_embedded(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array,
    embedded: EmbeddedRows, state: State, **options: Any,
) -> tuple[Array, Step, State]:  # fmt: skip
    """Compute :func:`forward` with embeddings."""
    return forward(
        ops, model, config, weights, message, state, embedded=embedded, **options
    )


def advance_embedded(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array,
    embedded: EmbeddedRows, state: State, **options: Any,
) -> tuple[Any, State]:  # fmt: skip
    """Compute :func:`advance` with embeddings."""
    logits, step, state = forward_embedded(
        ops, model, config, weights, message, embedded, state, **options
    )
    return sample(ops, logits, step, state)


def sample(
    ops: Ops, logits: Array, step: Step, state: State, *, scored: Array | None = None
) -> tuple[Any, State]:
    """Sample tokens, int32 [R * W], and store the last of each row in the state.

    A "sample_filtered" program returns a pair, the tokens and the
    :class:`~inl.spec.step.Scores` of the S samples, in place of the tokens. scored: the
    logits for the scores, if ``logits`` are masked.
    """
    bucket, sampler = ops.bucket, ops.bucket.sampler
    if not bucket.verifies:
        tokens, tables = ops.sample(logits, step, state.tables, sampler=sampler)
        kept = tokens
    else:
        # One row per token: a draft changes the counts of the tokens after it.
        expanded, copies = ops.expand_rows(step, _read_by(sampler, state.tables))
        tokens, _ = ops.sample(logits, expanded, copies, sampler=sampler)
        width = bucket.tokens_per_row
        kept, tables = ops.verify(tokens, step, state.tables, width=width)
    state = state._replace(tables=tables)
    if sampler != "sample_filtered":
        return kept, state
    return (kept, ops.score(logits if scored is None else scored, tokens)), state


def _read_by(sampler: str, tables: Tables) -> Tables:
    """Return the tables without the columns per token id, unless they are read.

    A copy for each token of a step would take more time and memory than its layers.
    """
    if sampler == "sample_filtered":
        return tables
    counts, bias = tables.token_counts[:, :0], tables.bias[:, :0]
    return tables._replace(token_counts=counts, bias=bias)


BODIES: Mapping[str, Callable[..., Any]] = {
    "advance": advance,
    "logits": forward,
    "pool": pool,
    "score": score,
    "advance_embedded": advance_embedded,
    "logits_embedded": forward_embedded,
}
"""Functions of the programs of a step."""
