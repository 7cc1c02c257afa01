"""Traces one step of a model on specs, without data: op calls, kernels and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from inl.adapters.weights import AdapterShape, strict_adapters
from inl.dtypes import E4M3
from inl.executor.model_step import advance, forward, pool_mean, sample, score
from inl.executor.taps import with_taps
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.dispatch import Choices, Tracer
from inl.spec.embedded_rows import EmbeddedRows
from inl.spec.limits import Limits
from inl.spec.message import TOKEN_BIAS_SIZE, admit_size, layout
from inl.spec.model import Model, is_recurrent
from inl.spec.selection import KernelSelection
from inl.spec.step import PARAMS, Bucket, Tables
from inl.spec.strict_array import StrictArray
from inl.spec.tree import tree_map

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


def trace(
    model: Model,
    config: Any,
    groups: Any,
    bucket: Bucket,
    limits: Limits,
    selection: KernelSelection,
    *,
    ranks: int = 1,
    table_width: int | None = None,
    taps: tuple[int, ...] = (),
    choices: Choices | None = None,
    is_scored: bool = False,
    is_mean: bool = False,
) -> Tracer:
    """Call every op of a step of ``bucket``, of masked sampling and of admissions.

    groups: weight tree whose leaves are :class:`~inl.weights.plan.WeightPlan`.
    table_width: columns of the block tables that the step reads; ``None`` is all.
    taps: layers whose inputs the step returns. choices: kernels that were selected for
    another bucket. is_scored: calls the ops of a step that scores its own tokens
    instead, which computes the last layer and the head for all of them. is_mean: those
    of one that returns the mean of each row's hidden states.
    """
    tracer = Tracer(selection, bucket, limits.block_size, choices or {})
    ops = cast("Ops", tracer)
    weights = tree_map(lambda plan: plan.specs(config.dtype), groups)
    shape = AdapterShape(limits.adapters, limits.adapter_rank)
    weights = strict_adapters(groups, weights, shape, config.dtype)
    words = layout(bucket, groups=limits.groups, block_size=limits.block_size).size
    message = StrictArray((words,), "int32")
    state = strict_state(model.state(config), limits, ranks=ranks)
    own: Any = score if is_scored else pool_mean if is_mean else forward
    options: Any = {"body": own, "taps": taps} if taps else {}
    body = with_taps if taps else own
    if is_scored:
        message = StrictArray((words + 2 * bucket.tokens,), "int32")
    results = body(
        ops, model, config, weights, message, state, table_width=table_width, **options
    )
    if is_scored or is_mean:
        return tracer
    logits, step, *_, state = results
    if not limits.takes_rows_only:
        # The ops of steps with inputs of tokens, whose calls are not those of a step.
        with_inputs = Tracer(selection, bucket, limits.block_size, tracer.choices)
        embedded = strict_inputs(bucket.tokens, limits, config.dtype)
        body(
            cast("Ops", with_inputs), model, config, weights, message,
            strict_state(model.state(config), limits, ranks=ranks),
            table_width=table_width, embedded=embedded, **options,
        )  # fmt: skip
    if bucket.verifies and is_recurrent(model, config):
        commits = Tracer(selection, bucket, limits.block_size, tracer.choices)
        advance(
            cast("Ops", commits), model, config, weights, message,
            strict_state(model.state(config), limits, ranks=ranks),
            table_width=table_width,
        )  # fmt: skip
    logits = StrictArray((logits.shape[0], limits.vocab), logits.dtype)  # of all ranks
    masks = StrictArray((logits.shape[0], -(-limits.vocab // 32)), "int32")
    ops.mask_logits(logits, masks)
    sample(ops, logits, step, state)
    frames = StrictArray(
        (1, admit_size(limits.groups, limits.max_blocks_per_seq)), "int32"
    )
    ops.admit(frames, state.tables)
    if limits.penalty_vocab:
        ops.set_token_bias(StrictArray((TOKEN_BIAS_SIZE,), "int32"), state.tables)
    return tracer


def strict_inputs(tokens: int, limits: Limits, dtype: str) -> EmbeddedRows:
    """Return the specs of the inputs of a step's tokens."""
    width, layers = limits.embedding, len(limits.feature_layers)
    rows = StrictArray((tokens, width), dtype)
    offsets = StrictArray((limits.axes, tokens), "int32") if limits.axes else None
    spans = StrictArray((tokens, 2), "int32") if limits.spans else None
    added = StrictArray((layers, tokens, width), dtype) if layers else None
    return EmbeddedRows(StrictArray((tokens, 1), dtype), rows, offsets, spans, added)


def strict_state(
    spec: tuple[Paged | Slotted, ...], limits: Limits, *, ranks: int = 1
) -> State:
    """Return the specs of the state of one rank in its default layout."""
    caches: dict[int, Cache] = {}
    paged = [item for item in spec if isinstance(item, Paged)]
    for group, blocks in zip(paged, limits.blocks, strict=True):
        heads = group.kv_heads // ranks
        shape = (blocks, limits.block_size, heads, group.head_dim)
        for index in group.layers:
            caches[index] = Cache(
                StrictArray(shape, group.dtype),
                StrictArray(shape, group.dtype),
                StrictArray((2,), "float32") if group.dtype == E4M3 else None,
            )
    slotted = {
        item.name: StrictArray((limits.slots, *item.shape), item.dtype)
        for item in spec
        if isinstance(item, Slotted)
    }
    slots = limits.slots
    tables = Tables(
        blocks=StrictArray((limits.groups, slots, limits.max_blocks_per_seq), "int32"),
        lengths=StrictArray((slots,), "int32"),
        last=StrictArray((slots,), "int32"),
        adapters=StrictArray((slots,), "int32"),
        params=StrictArray((slots, len(PARAMS)), "float32"),
        token_counts=StrictArray((slots, limits.penalty_vocab), "int32"),
        bias=StrictArray((slots, limits.penalty_vocab), "float32"),
    )
    return State(
        caches=tuple(caches[index] for index in sorted(caches)),
        slotted=slotted,
        tables=tables,
    )
