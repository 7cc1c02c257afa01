"""Sizes a runner's slots and cache blocks for the memory of its device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.base import CacheBytes
from inl.backend.collectives import PIPELINE
from inl.backend.state_bytes import array_bytes, block_bytes
from inl.config import EngineConfig
from inl.dtypes import wrap
from inl.errors import OutOfMemory
from inl.placement.mesh import DATA, EXPERT, mesh_of
from inl.placement.ranks import AXIS, collectives_of, count_expert_ranks
from inl.protocol.runner import Limits
from inl.spec.cache import Paged, Slotted
from inl.spec.model import Model
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.executor.vision_model import VisionModel
    from inl.spec.kernel import Kernel

LEAST_SHARE = 0.25
"""Share of the free memory that the cache has even where little is left for programs,
unless the backend asks for less."""

PROGRAM_BYTES = 2 << 30
"""Memory for the code and the recorded commands of all programs."""

STEP_BUFFERS = 4
"""Intermediate results of a step that exist at once, as multiples of its widest one."""


def plan_limits(
    model: Model,
    shaped: Any,
    backend: Backend,
    config: EngineConfig,
    *,
    ranks: int = 1,
    sharers: int = 1,
    data_ranks: int = 1,
    reserved: int = 0,
    beside: Paged | None = None,
) -> Limits:
    """Return limits for the batch and context of ``config`` within the cache's memory.

    shaped: the model's config, with its dtype. ranks: number of ranks; each caches its
    share of the heads, and ``cache_bytes`` is per rank. sharers: number of devices
    that share the blocks. data_ranks: number of ranks that divide the batch, with
    limits for the rows of each. reserved: bytes of free memory that something else will
    take. beside: the cache of a draft head, which has the blocks of the first group
    without a window, and more for drafts; it is not part of ``cache_bytes``. Raises
    :class:`~inl.errors.OutOfMemory` if not even one sequence fits.
    """
    size = backend.traits.block_size
    context = min(config.context or shaped.max_tokens, shaped.max_tokens)
    seq_blocks = -(-context // size)
    paged = [
        item._replace(kv_heads=item.kv_heads // ranks)
        for item in model.state(shaped)
        if isinstance(item, Paged)
    ]
    layout = backend.offers(CacheBytes)
    costs = [block_bytes(group, size, layout) for group in paged]
    batch = -(-(config.max_batch or backend.traits.max_batch) // data_ranks)
    token_budget = config.token_budget or backend.traits.token_budget
    budget = config.cache_bytes or _default_budget(
        model, shaped, backend, token_budget * data_ranks, batch, reserved
    )
    budget *= sharers
    windows = [group.window for group in paged]
    if beside is not None and not config.cache_bytes and None in windows:
        own = block_bytes(beside, size, layout)
        costs[windows.index(None)] += own
        budget = max(budget - own * draft_blocks(config.draft_limit, size) * batch, 0)
    per_block = sum(costs)
    affordable = budget // per_block
    if config.context is None:
        seq_blocks = min(seq_blocks, max(affordable, 0))
    if affordable < seq_blocks or seq_blocks < 1:
        raise OutOfMemory(
            f"cache: one sequence of {context} tokens needs "
            f"{max(seq_blocks, 1) * per_block:,} bytes, {budget:,} are allowed; "
            "lower context or raise cache_bytes"
        )
    return Limits(
        slots=batch + 1,
        blocks=_group_blocks(paged, costs, budget, seq_blocks, size, batch),
        windows=tuple(group.window for group in paged),
        block_size=size,
        max_blocks_per_seq=seq_blocks,
        vocab=shaped.vocab_size,
        depth=config.steps_in_flight(backend.traits.depth),
        sampler=config.sampling,
        token_budget=token_budget,
        # Ranks that divide the rows might repeat a step unequally often.
        decode_steps=1
        if data_ranks > 1
        else config.repeated_steps(backend.traits.decode_steps),
        max_drafts=config.draft_limit,
        adapters=config.adapter_slots,
        adapter_rank=config.adapter_rank,
        embedding=0 if data_ranks > 1 else embedding_width(model, shaped),
    )


def draft_blocks(drafts: int, block_size: int) -> int:
    """Return the blocks of a slot that hold drafted tokens of a draft head."""
    return -(-drafts // block_size) + 1


def _default_budget(
    model: Model, shaped: Any, backend: Backend, tokens: int, rows: int, reserved: int
) -> int:
    """Return the bytes of the cache where the config sets none.

    tokens, rows: of the largest step.
    """
    share, free = backend.traits.cache_share, backend.memory().free
    free = max(free - reserved, 0)
    free = max(free - _slot_bytes(model, shaped, rows + 1), 0)
    step = _step_bytes(model, shaped, tokens, rows) + PROGRAM_BYTES
    return max(int(share * free) - step, int(min(share, LEAST_SHARE) * free))


def _slot_bytes(model: Model, shaped: Any, slots: int) -> int:
    """Return the memory of the state of all slots."""
    return sum(
        array_bytes((slots, *item.shape), item.dtype)
        for item in model.state(shaped)
        if isinstance(item, Slotted)
    )


def _step_bytes(model: Model, shaped: Any, tokens: int, rows: int) -> int:
    """Estimate the memory of the intermediate results of a step."""
    outputs = [
        param.shape[-2]
        for group in leaves(model.weights(shaped).layers)
        for param in group.params.values()
        if len(param.shape) > 1
    ]
    hidden = array_bytes((tokens, max(outputs, default=0)), shaped.dtype)
    logits = array_bytes((rows, shaped.vocab_size), "float32")
    return STEP_BUFFERS * (hidden + logits)


def weight_bytes(plans: Any, dtype: str) -> int:
    """Return the memory of a rank's weights; plans: its tree of weight plans.

    Tensors that several groups take as they are stored count once.
    """
    found: dict[tuple[str, str], int] = {}
    for plan in leaves(plans):
        specs = plan.specs(dtype)
        for name, param in plan.group.params.items():
            spec = getattr(specs, name)
            size = spec.stored_bytes or array_bytes(spec.shape, str(spec.dtype))
            key = param.source, plan.layout
            found[key] = max(size, found.get(key, 0))
    return sum(found.values())


def vision_bytes(vision: VisionModel, dtype: str) -> int:
    """Estimate the memory of a vision encoder, with the image of the most patches."""
    shaped = replace(vision.config, dtype=dtype)
    shapes = [
        param.shape
        for group in leaves(vision.encoder.weights(shaped))
        for param in group.params.values()
    ]
    widest = max(shape[-2] for shape in shapes if len(shape) > 1)
    hidden = array_bytes((vision.settings.max_patches, widest), dtype)
    return sum(array_bytes(shape, dtype) for shape in shapes) + STEP_BUFFERS * hidden


def embedding_width(model: Model, shaped: Any) -> int:
    """Return the elements of a row of embeddings, 0 if the model needs token ids."""
    groups = leaves(model.weights(shaped))
    if any(group.op == "token_routed_mlp" for group in groups):
        return 0
    return int(getattr(shaped, "hidden_size", 0))


def with_inputs(
    limits: Limits, model: Model, shaped: Any, kernels: Sequence[Kernel]
) -> Limits:
    """Return limits with the inputs of tokens that a model takes on these kernels.

    Spans need a kernel of their own: without one a backend computes texts only.
    """
    inputs = model.inputs(shaped)
    can_span = any(kernel.op == "span_attention" for kernel in kernels)
    return replace(
        limits, axes=inputs.axes, spans=inputs.spans and can_span,
        feature_layers=inputs.feature_layers,
    )  # fmt: skip


def _group_blocks(
    paged: Sequence[Paged],
    costs: Sequence[int],
    budget: int,
    seq_blocks: int,
    size: int,
    batch: int,
) -> tuple[int, ...]:
    """Return the blocks of each cache group that fit into ``budget`` bytes.

    costs: bytes of a block of each group. A sequence has ``seq_blocks`` blocks. A group
    with a window has room for one whole sequence, whose prompt is computed, and for the
    windows of all others, with the blocks that enter and leave them.
    """

    def counts(blocks: int) -> tuple[int, ...]:
        others = -(-(blocks - seq_blocks) // seq_blocks)
        return tuple(
            min(blocks, seq_blocks + others * (-(-group.window // size) + 2))
            if group.window is not None
            else blocks
            for group in paged
        )

    def cost(blocks: int) -> int:
        parts = zip(counts(blocks), costs, strict=True)
        return sum(count * each for count, each in parts)

    # The cost is increasing, and ``seq_blocks`` blocks are known to be affordable.
    most = bisect_right(range(seq_blocks, batch * seq_blocks + 1), budget, key=cost)
    return tuple(1 + count for count in counts(seq_blocks + most - 1))


def min_limits(
    limits: Limits, backend: Backend, *, stages: int = 1, data_ranks: int = 1
) -> Limits:
    """Return limits that every rank has memory for; free memory may differ."""
    mesh, collectives = mesh_of(backend), collectives_of(backend)
    sizes = np.array([[limits.max_blocks_per_seq, *limits.blocks]], np.int32)
    if mesh is not None:
        least = mesh.least(sizes).reshape(-1)
    elif collectives is None:
        return limits
    else:
        least = sizes.reshape(-1)
        axes = [AXIS]
        axes += [PIPELINE] if stages > 1 else []
        axes += [EXPERT] if count_expert_ranks(backend) > 1 else []
        axes += [DATA] if data_ranks > 1 else []
        for axis in axes:
            one = backend.tensor(wrap(least.reshape(1, -1)))
            gathered = backend.numpy(collectives.all_gather(one, axis)).data
            least = gathered.reshape(-1, sizes.size).min(0)
    seq_blocks, *blocks = least.tolist()
    return replace(limits, max_blocks_per_seq=seq_blocks, blocks=tuple(blocks))
