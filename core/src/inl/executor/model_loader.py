"""Opens checkpoints and starts runners: model, dtypes, kernels, weights and cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.backend.base import DecodedBlocks, PackedKernels, StorageDtypes
from inl.backend.ranks import collectives_of, count_ranks, over_ranks
from inl.backend.weight_cache import WeightCache
from inl.config import EngineConfig
from inl.dtypes import FLOATS, SIZES, wrap
from inl.errors import CheckpointError, RequestError
from inl.executor.adapter_stacks import AdapterStacks
from inl.executor.adapter_weights import AdapterShape, with_adapters
from inl.executor.cache_dtype import cache_dtype, caching_in
from inl.executor.cache_sizing import min_limits, plan_limits
from inl.executor.local_runner import Loaded, LocalRunner
from inl.executor.sharding import check_mesh, check_shares, with_repeated_heads
from inl.executor.tied_weights import without_copies
from inl.executor.tuning_results import load_tuning_results
from inl.models.fields import Fields, refuse_fields
from inl.models.registry import find_model
from inl.plugin import registry_for
from inl.progress import LoadStage, Progress, ProgressReporter
from inl.protocol.runner import Limits
from inl.spec.cache import Slotted
from inl.spec.mesh import MeshSizes, mesh_of
from inl.spec.model import Model
from inl.spec.op import OpSpec
from inl.spec.selection import KernelSelection
from inl.spec.tolerance import round_results
from inl.spec.tree import tree_map
from inl.weights.causal import causal
from inl.weights.checkpoint import Checkpoint, open_checkpoint
from inl.weights.counts import check_counts
from inl.weights.loader import load_weights, stored_specs
from inl.weights.plan import check_tensors, plan_weights
from inl.weights.quantization import FIELD, Quantization

if TYPE_CHECKING:
    from pathlib import Path

    from inl.backend.base import Backend
    from inl.weights.quantizing import QuantizingCheckpoint

log = logging.getLogger("inl")


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A checkpoint and its architecture, without weights."""

    model: Model
    config: Any
    checkpoint: Checkpoint
    taps: tuple[int, ...] = ()
    """Layers whose inputs each step also returns, for a draft head."""
    quantize: str | None = None
    """Kind that matrices are quantized to while they are loaded."""

    @property
    def name(self) -> str:
        """File or folder name."""
        return self.checkpoint.path.name

    def quantized(self, kind: str) -> LanguageModel:
        """Return the model with the matrices of its layers quantized while loading.

        kind: "fp8", "int8" or "int4", see
        :attr:`~inl.config.EngineConfig.quantize`. Raises
        :class:`~inl.errors.RequestError` for another kind, and for a model that is
        quantized already.
        """
        if kind == self.quantize:
            return self
        from inl.executor.weight_quantization import quantizing

        checkpoint = quantizing(self.model, self.config, self.checkpoint, kind)
        return replace(self, checkpoint=checkpoint, quantize=kind)

    @property
    def quantization(self) -> Quantization | None:
        """The errors of :meth:`quantized`; reads matrices that are not loaded yet."""
        if self.quantize is None:
            return None
        return _quantizing(self.checkpoint).quantization()


def open_model(path: str | Path) -> LanguageModel:
    """Open a model's files and check its config and the shapes of its tensors.

    Reads no weights. Raises :class:`~inl.errors.ModelError`.
    """
    return read_model(open_checkpoint(path))


def read_model(checkpoint: Checkpoint) -> LanguageModel:
    """Check the config of an open checkpoint and the shapes of its tensors.

    Logs a warning that names the config fields that are ignored. Raises
    :class:`~inl.errors.ModelError`.
    """
    checkpoint = causal(checkpoint)
    if checkpoint.config.get(FIELD):
        from inl.weights.quantized import quantized

        checkpoint = quantized(checkpoint)
    model = find_model(checkpoint.config, checkpoint.path)
    tensors = len(checkpoint.names())
    check_counts(checkpoint.config, tensors, str(checkpoint.path))
    fields = Fields(checkpoint.config)
    try:
        refuse_fields(fields)
        config = model.config(fields)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    _warn_of(fields, checkpoint)
    config, checkpoint = model.adapt(config, checkpoint)
    stored = stored_specs(checkpoint)
    groups = plan_weights(model.weights(config), (), stored)
    check_tensors(groups, stored, str(checkpoint.path))
    return LanguageModel(model, config, checkpoint)


def _warn_of(fields: Fields, checkpoint: Checkpoint) -> None:
    """Log the fields that are ignored."""
    unread = fields.unread()
    if unread:
        log.warning(
            "%s: config fields that are not known and ignored: %s",
            checkpoint.path,
            ", ".join(unread),
        )


def configure(language: LanguageModel, config: EngineConfig) -> LanguageModel:
    """Return the model with the settings of an engine's config.

    A model with LongRoPE has the rotation of the context that the config asks for.
    Raises :class:`~inl.errors.RequestError` for a setting that it does not have.
    """
    language = _with_context(language, config.context or 0)
    if config.quantize is not None:
        language = language.quantized(config.quantize)
    if config.velocity is None:
        return language
    if "velocity" not in {field.name for field in fields(language.config)}:
        raise RequestError(
            f"EngineConfig.velocity: found {config.velocity!r}, but {language.name} is "
            "no INL model; accepted: None"
        )
    return replace(language, config=replace(language.config, velocity=config.velocity))


def longest_context(language: LanguageModel) -> int:
    """Return the largest context in tokens that :func:`configure` accepts."""
    longer = getattr(language.config, "longer", None)
    return int(longer[0] if longer else language.config.max_tokens)


def _with_context(language: LanguageModel, tokens: int) -> LanguageModel:
    longer = getattr(language.config, "longer", None)
    if longer is None or tokens <= language.config.max_tokens:
        return language
    limit, scaling = longer
    tokens = min(tokens, limit)
    changed = replace(language.config, max_tokens=tokens, rope_scaling=scaling)
    return replace(language, config=changed)


def is_replayed(language: LanguageModel) -> bool:
    """Whether the model has state that only computing token by token restores."""
    return "replay" in _rebuilds(language)


def is_recurrent(language: LanguageModel) -> bool:
    """Whether the model has state that every token changes."""
    return "tokens" in _rebuilds(language)


def _rebuilds(language: LanguageModel) -> set[str]:
    state = language.model.state(language.config)
    return {item.rebuild for item in state if isinstance(item, Slotted)}


def start_runner(
    language: LanguageModel,
    backend: Backend,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
    rank: int = 0,
) -> LocalRunner:
    """Load the weights on ``backend`` and make its runner.

    limits: planned from the free memory by default. progress: called with the
    bytes of the weights, then with the programs that are compiled at the start
    (:attr:`~inl.config.EngineConfig.warm_up`). rank: part of the weights, if
    ``backend`` offers :class:`~inl.backend.base.Collectives`; every rank must make the
    same call.
    """
    dtype = compute_dtype(backend, config.dtype)
    language = stored_for(configure(language, config), backend, dtype)
    backend = in_dtype(backend, dtype)
    shaped = replace(language.config, dtype=dtype)
    cache = cache_dtype(backend, config.kv_dtype, language.checkpoint)
    model = caching_in(language.model, cache, language.checkpoint)
    ranks, mesh = count_ranks(backend), mesh_of(backend)
    if mesh is not None:
        check_mesh(model, shaped, mesh, config)
        model = with_repeated_heads(model, shaped, ranks)
    sizes = mesh.sizes if mesh else MeshSizes()
    stored = without_copies(
        language.checkpoint, tied=getattr(language.config, "tied", False)
    )
    config = replace(config, quantize=language.quantize)
    selection = kernel_selection(backend, config)
    shape = adapter_shape(limits, config)
    tree = model.weights(shaped)
    if shape.adapters:
        tree = with_adapters(tree)
    groups = plan_weights(
        tree, selection.kernels, stored, ranks=ranks, expert_ranks=sizes.expert,
        invariant=config.invariant,
    )  # fmt: skip
    check_shares(groups, model.state(shaped), ranks)
    if language.quantize and rank == 0:
        _log_notes(language, groups)
    if limits is None:
        planned = plan_limits(
            model, shaped, backend, config, ranks=ranks, sharers=sizes.data
        )
        limits = min_limits(planned, backend)
    report = ProgressReporter(progress)
    report(0, 1)  # so that a bar appears before the cache is looked up
    load = partial(
        load_weights, groups, language.checkpoint, backend, dtype, rank=rank,
        check=config.check_weights, progress=report,
    )  # fmt: skip
    packed = backend.offers(WeightCache)  # type: ignore[type-abstract]
    # Only checked weights are stored, since those of the cache are not checked again.
    if packed is None or ranks > 1 or not config.check_weights:
        weights = load()
    else:
        checkpoint = language.checkpoint
        opened = checkpoint.identities()
        files = {path: opened.get(path) for path in checkpoint.files()}
        forms = ("adapters" if shape.adapters else "", language.quantize or "")
        form = " ".join(filter(None, forms))
        variant = {"variant": form} if form else {}
        weights = packed.load(files, dtype, load, report, **variant)
    if rank == 0 and (quantization := language.quantization):
        log.info("%s: %s", language.name, quantization.describe())
    stacks = None
    if shape.adapters:
        stacks = AdapterStacks(groups, backend, dtype, shape, rank)
        weights = stacks.attached(weights)
    loaded = Loaded(
        model, shaped, groups, weights, selection, ranks, stacks, language.taps
    )
    runner = LocalRunner(backend, loaded, limits)
    if config.warm_up:
        report.stage = LoadStage.COMPILING
        runner.warm_up(report)
    return runner


def _log_notes(language: LanguageModel, groups: Any) -> None:
    """Log which matrices are not quantized, or not in memory."""
    from inl.executor.weight_quantization import decoded_note

    checkpoint = _quantizing(language.checkpoint)
    decoded = decoded_note(groups, checkpoint.kind)
    for note in filter(None, (*checkpoint.skip_notes(), decoded)):
        log.warning("%s: %s", language.name, note)


def _quantizing(checkpoint: Checkpoint) -> QuantizingCheckpoint:
    from inl.weights.quantizing import QuantizingCheckpoint

    assert isinstance(checkpoint, QuantizingCheckpoint), "quantized() makes it"
    return checkpoint


def adapter_shape(limits: Limits | None, config: EngineConfig) -> AdapterShape:
    """Return the room for adapters: that of ``limits``, or else of the config."""
    if limits is not None:
        return AdapterShape(limits.adapters, limits.adapter_rank)
    return AdapterShape(config.adapter_slots, config.adapter_rank)


def kernel_selection(backend: Backend, config: EngineConfig) -> KernelSelection:
    """Return the kernels that an engine may select from, with its preferences."""
    kind = backend.device.type
    kernels = (*backend.kernels(), *registry_for(kind).kernels(kind))
    if config.quantize and (packed := backend.offers(PackedKernels)):
        kernels = (*kernels, *packed.kernels())
    if (collectives := collectives_of(backend)) is not None:
        kernels = tuple(over_ranks(kernels, collectives))
    return KernelSelection(
        kernels,
        host=partial(hosted, backend) if config.allow_hosted else None,
        invariant=config.invariant,
        device_name=str(backend.device),
        tuning_results=load_tuning_results(backend),
    )


def compute_dtype(backend: Backend, wanted: str) -> str:
    """Resolve "auto" to the backend's preferred dtype.

    Raises :class:`~inl.errors.RequestError` for a dtype that it does not compute in.
    """
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


def stored_for(language: LanguageModel, backend: Backend, dtype: str) -> LanguageModel:
    """Return the model with quantized matrices as ``backend`` loads them in ``dtype``.

    A dtype of 16 bits rounds more than the dtypes that their blocks may have.
    """
    if SIZES[dtype] > 2:
        return language
    blocks = backend.offers(DecodedBlocks)
    checkpoint = language.checkpoint.rounded(blocks.dtype if blocks else "float32")
    return replace(language, checkpoint=checkpoint)


def in_dtype(backend: Backend, dtype: str) -> Backend:
    """Return a backend that stores in ``dtype``, reopened if it needs that."""
    storage = backend.offers(StorageDtypes)
    if storage is None or dtype in backend.traits.dtypes:
        return backend
    return storage.storing(dtype)


def hosted(backend: Backend, spec: OpSpec) -> Callable[..., Any]:
    """Return a kernel that computes an op's body in NumPy on the host. Slow."""

    def run(*args: Any, **attrs: Any) -> Any:
        def fetch(x: Any) -> Any:
            from inl.dtypes import widen

            return widen(backend.numpy(x))

        result = spec.body(*(tree_map(fetch, arg) for arg in args), **attrs)
        rounded = round_results(spec, result, "float32")
        return tree_map(lambda leaf: backend.tensor(wrap(leaf)), rounded)

    return run
