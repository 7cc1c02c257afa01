"""From a checkpoint to a runner: which model, which kernels, how much cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.base import StorageDtypes
from inl.backend.ranks import AXIS, collectives_of, count_ranks, over_ranks
from inl.backend.state_bytes import block_bytes
from inl.backend.weight_cache import WeightCache
from inl.config import EngineConfig
from inl.dtypes import FLOATS, wrap
from inl.errors import CheckpointError, OutOfMemory, RequestError
from inl.executor.local_runner import Loaded, LocalRunner
from inl.executor.rank_runner import check_shares
from inl.executor.tuning_results import load_tuning_results
from inl.models.registry import find_model
from inl.plugin import registry
from inl.protocol.runner import Limits
from inl.spec.cache import Paged, Slotted
from inl.spec.model import Model
from inl.spec.op import OpSpec
from inl.spec.selection import KernelSelection
from inl.spec.tolerance import round_results
from inl.spec.tree import tree_map
from inl.weights.checkpoint import Checkpoint, open_checkpoint
from inl.weights.loader import load_weights, stored_specs
from inl.weights.plan import check_tensors, plan_weights
from inl.weights.progress import LoadStage, Progress, ProgressReporter

if TYPE_CHECKING:
    from pathlib import Path

    from inl.backend.base import Backend, StateSpec

CACHE_SHARE = 0.25
"""Part of the free memory that the cache may take unless told otherwise."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A checkpoint together with the architecture that reads it; no weights yet."""

    model: Model
    config: Any
    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        """File or folder name."""
        return self.checkpoint.path.name


def open_model(path: str | Path) -> LanguageModel:
    """Open a model's files and check its config and its tensors' shapes.

    Raises :class:`~inl.errors.ModelError`; reads no weights.
    """
    checkpoint = open_checkpoint(path)
    model = find_model(checkpoint.config, checkpoint.path)
    try:
        config = model.config(checkpoint.config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    config, checkpoint = model.adapt(config, checkpoint)
    stored = stored_specs(checkpoint)
    groups = plan_weights(model.weights(config), (), stored)
    check_tensors(groups, stored, str(checkpoint.path))
    return LanguageModel(model, config, checkpoint)


def configure(language: LanguageModel, config: EngineConfig) -> LanguageModel:
    """The model with what an engine's config says of it.

    Raises :class:`RequestError` where the model knows no such thing.
    """
    if config.velocity is None:
        return language
    if "velocity" not in {field.name for field in fields(language.config)}:
        raise RequestError(
            f"EngineConfig.velocity: found {config.velocity!r}, but {language.name} is "
            "no INL model; accepted: None"
        )
    return replace(language, config=replace(language.config, velocity=config.velocity))


def is_replayed(language: LanguageModel) -> bool:
    """Whether the model keeps state that only computing token by token restores."""
    kept = language.model.state(language.config)
    slotted = [item for item in kept if isinstance(item, Slotted)]
    return any(item.rebuild == "replay" for item in slotted)


def start_runner(
    language: LanguageModel,
    backend: Backend,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
    rank: int = 0,
) -> LocalRunner:
    """Load the weights on ``backend`` and make its runner, planned unless given.

    progress: called with the bytes of the weights, then with the programs that are
    compiled at the start (:attr:`EngineConfig.warm_up`). rank: which part of the weights, where ``backend`` offers
    :class:`~inl.backend.base.Collectives`; every rank must make the same call.
    """
    language = configure(language, config)
    dtype = compute_dtype(backend, config.dtype)
    backend = in_dtype(backend, dtype)
    shaped = replace(language.config, dtype=dtype)
    model = caching_in(language.model, backend, config.kv_dtype)
    ranks = count_ranks(backend)
    stored = stored_specs(language.checkpoint)
    selection = kernel_selection(backend, config)
    groups = plan_weights(model.weights(shaped), selection.kernels, stored, ranks=ranks)
    check_shares(groups, model.state(shaped), ranks)
    if limits is None:
        planned = plan_limits(model, shaped, backend, config, ranks=ranks)
        limits = min_limits(planned, backend)
    report = ProgressReporter(progress)
    report(0, 1)  # so that a bar appears before the cache is looked up
    load = partial(
        load_weights, groups, language.checkpoint, backend, dtype, rank=rank,
        progress=report,
    )  # fmt: skip
    kept = backend.offers(WeightCache)  # type: ignore[type-abstract]
    if kept is None or ranks > 1:
        weights = load()
    else:
        weights = kept.load(language.checkpoint.files(), dtype, load, report)
    loaded = Loaded(model, shaped, groups, weights, selection, ranks)
    runner = LocalRunner(backend, loaded, limits)
    if config.warm_up:
        report.stage = LoadStage.COMPILING
        runner.warm_up(report)
    return runner


def min_limits(limits: Limits, backend: Backend) -> Limits:
    """What every rank has memory for; their devices may not be equally free."""
    collectives = collectives_of(backend)
    if collectives is None:
        return limits
    sizes = np.array([[limits.max_blocks_per_seq, *limits.blocks]], np.int32)
    found = collectives.all_gather(backend.tensor(wrap(sizes)), AXIS)
    width, *blocks = backend.numpy(found).data.reshape(-1, sizes.size).min(0).tolist()
    return replace(limits, max_blocks_per_seq=width, blocks=tuple(blocks))


def kernel_selection(backend: Backend, config: EngineConfig) -> KernelSelection:
    """Which kernels an engine may choose from."""
    kernels = (*backend.kernels(), *registry().kernels(backend.device.type))
    if (collectives := collectives_of(backend)) is not None:
        kernels = tuple(over_ranks(kernels, collectives))
    return KernelSelection(
        kernels,
        host=partial(hosted, backend) if config.allow_hosted else None,
        invariant=config.invariant,
        captured=backend.traits.captures_programs,
        device_name=str(backend.device),
        tuning_results=load_tuning_results(backend),
    )


def compute_dtype(backend: Backend, wanted: str) -> str:
    """Resolve "auto" to the backend's preference; refuse what it cannot compute in."""
    if wanted == "auto":
        return backend.traits.dtypes[0]
    if wanted not in FLOATS:
        raise RequestError(
            f"dtype: found {wanted!r}, accepted: auto, {', '.join(FLOATS)}"
        )
    storage = backend.offers(StorageDtypes)
    served = storage.dtypes if storage else backend.traits.dtypes
    if wanted not in served:
        raise RequestError(
            f"dtype: found {wanted!r}, {backend.device} computes in {', '.join(served)}"
        )
    return wanted


def caching_in(model: Model, backend: Backend, wanted: str) -> Model:
    """Keep keys and values in another dtype; refuse what has no cache."""
    if wanted == "auto":
        return model
    served = backend.traits.kv_dtypes
    if wanted not in served:
        others = ", ".join(("auto", *served))
        raise RequestError(
            f"kv_dtype: found {wanted!r}, {backend.device} accepts {others}; "
            "auto caches in the dtype that it computes in"
        )
    return replace(model, state=partial(_state_in, model.state, wanted))


def _state_in(state: Callable[[Any], StateSpec], dtype: str, config: Any) -> StateSpec:
    return tuple(
        item._replace(dtype=dtype) if isinstance(item, Paged) else item
        for item in state(config)
    )


def in_dtype(backend: Backend, dtype: str) -> Backend:
    """Open the backend once more where it must be told the dtype to store in."""
    storage = backend.offers(StorageDtypes)
    if storage is None or dtype in backend.traits.dtypes:
        return backend
    return storage.storing(dtype)


def plan_limits(
    model: Model, shaped: Any, backend: Backend, config: EngineConfig, *, ranks: int = 1
) -> Limits:
    """Size slots and caches: what the batch may need, within the cache's memory.

    ranks: each holds its share of the heads, and ``cache_bytes`` is for each.
    Raises :class:`OutOfMemory` where not even one sequence fits.
    """
    size = backend.traits.block_size
    context = min(config.context or shaped.max_tokens, shaped.max_tokens)
    width = -(-context // size)
    paged = [
        item._replace(kv_heads=item.kv_heads // ranks)
        for item in model.state(shaped)
        if isinstance(item, Paged)
    ]
    per_block = sum(block_bytes(group, size) for group in paged)
    free = backend.memory().free
    budget = config.cache_bytes or int(CACHE_SHARE * free)
    affordable = budget // per_block
    if config.context is None:
        width = min(width, max(affordable, 0))
    if affordable < width or width < 1:
        raise OutOfMemory(
            f"cache: one sequence of {context} tokens needs "
            f"{max(width, 1) * per_block:,} bytes, {budget:,} are allowed; "
            "lower context or raise cache_bytes"
        )
    return Limits(
        slots=config.max_batch + 1,
        blocks=_share(paged, budget, width, size, config.max_batch),
        windows=tuple(group.window for group in paged),
        block_size=size,
        max_blocks_per_seq=width,
        vocab=shaped.vocab_size,
        depth=config.depth or backend.traits.depth,
        sampler=config.sampling,
        token_budget=config.token_budget or backend.traits.token_budget,
    )


def _share(
    paged: Sequence[Paged], budget: int, width: int, size: int, batch: int
) -> tuple[int, ...]:
    """Blocks of each cache group, for as many sequences as ``budget`` pays for.

    A sequence is ``width`` blocks. A group with a window holds one whole, whose prompt
    is being computed, and of every other what its window shows and passes next.
    """

    def counts(blocks: int) -> tuple[int, ...]:
        others = -(-(blocks - width) // width)
        return tuple(
            min(blocks, width + others * (-(-group.window // size) + 2))
            if group.window is not None
            else blocks
            for group in paged
        )

    def cost(blocks: int) -> int:
        parts = zip(counts(blocks), paged, strict=True)
        return sum(count * block_bytes(group, size) for count, group in parts)

    # Costs rise with the number, and ``width`` blocks are known to be affordable.
    most = bisect_right(range(width, batch * width + 1), budget, key=cost)
    return tuple(1 + count for count in counts(width + most - 1))


def hosted(backend: Backend, spec: OpSpec) -> Callable[..., Any]:
    """Compute an op's body in NumPy: there and back again. Slow, and said so."""

    def run(*args: Any, **attrs: Any) -> Any:
        def fetch(x: Any) -> Any:
            from inl.dtypes import widen

            return widen(backend.numpy(x))

        result = spec.body(*(tree_map(fetch, arg) for arg in args), **attrs)
        rounded = round_results(spec, result, "float32")
        return tree_map(lambda leaf: backend.tensor(wrap(leaf)), rounded)

    return run
