"""LoadPlan: how a model is loaded on a backend and computed there, without its data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.adapters.stacks import AdapterStacks
from inl.adapters.weights import AdapterShape, with_adapters
from inl.backend.base import PackedKernels, StorageDtypes
from inl.backend.host import is_host_memory
from inl.backend.provisional import DecodedBlocks, WeightCopies
from inl.backend.weight_cache import WeightCache
from inl.config import EngineConfig
from inl.dtypes import FLOATS, SIZES, HostArray, wrap
from inl.errors import RequestError, RunnerError
from inl.executor.cache_dtype import CacheDtype, cache_dtype, caching_in
from inl.executor.cache_sizing import (
    min_limits,
    plan_limits,
    vision_bytes,
    weight_bytes,
    with_inputs,
)
from inl.executor.loaded import Loaded
from inl.executor.model_executor import bound_tracer, used_whole_models
from inl.executor.pipeline import Stage, check_stages, stage_of
from inl.executor.repeated_frames import with_programs
from inl.executor.tied_weights import without_copies
from inl.executor.tuning_results import load_tuning_results
from inl.executor.vision_model import open_projector
from inl.placement.mesh import mesh_of
from inl.placement.placement import Placement
from inl.placement.ranks import (
    collectives_of,
    count_data_ranks,
    count_expert_ranks,
    count_ranks,
    expert_part,
    over_ranks,
    planned_ranks,
    selected_collectives,
    with_own_experts,
)
from inl.placement.sharding import (
    check_experts,
    check_shares,
    divisible,
    has_experts,
)
from inl.plugin import registry_for
from inl.progress import ProgressReporter
from inl.protocol.runner import Limits
from inl.spec.cache import Paged
from inl.spec.op import OpSpec, Spec
from inl.spec.selection import KernelSelection
from inl.spec.tolerance import round_results
from inl.spec.tree import leaves, tree_map
from inl.weights.expert_copies import TablesCheckpoint, planned_copies, table_specs
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import plan_weights

if TYPE_CHECKING:
    from inl.backend.base import Backend, Collectives
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.executor.model_loader import LanguageModel
    from inl.spec.dispatch import Tracer
    from inl.spec.step import Bucket

log = logging.getLogger("inl")

COPIES_SHARE = 0.25
"""Most of the free memory that copies of weights take, unless they are asked for."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model is loaded on a backend and computed there.

    Made by :meth:`of` without reading weights. What starts a runner, and what only
    describes one, takes the model, the weights' layouts and the kernels from here.
    """

    language: LanguageModel
    """With the settings of the config, and matrices as the backend loads them."""
    backend: Backend
    """Stores in the compute dtype."""
    config: EngineConfig
    unloaded: Loaded
    """The model, its weight plans and kernels, without weights."""
    limits: Limits
    """With the programs of the backend."""
    cache: CacheDtype
    tables: Mapping[str, HostArray] = field(default_factory=dict)
    """Tables of :class:`~inl.weights.expert_copies.ExpertCopies`, by name."""
    copied_bytes: int = 0
    """Bytes of the copies of a rank's weights: see
    :class:`~inl.backend.provisional.WeightCopies`."""

    @classmethod
    def of(
        cls,
        language: LanguageModel,
        backend: Backend,
        config: EngineConfig,
        *,
        limits: Limits | None = None,
        stage: Stage | None = None,
    ) -> LoadPlan:
        """Plan a model for an engine's config.

        backend: one device, a mesh or a rank of a group; a single device with
        ``config.placement`` of several has the plan of one rank, which cannot be
        loaded. limits: planned from the free memory by default. stage: of the pipeline
        whose part is planned; the first of those of ``config`` by default. Ranks of a
        group must make the same call. Raises :class:`~inl.errors.RequestError` and
        :class:`~inl.errors.ModelError` for settings that model or backend do not have,
        and :class:`~inl.errors.OutOfMemory`.
        """
        if language.encoder is not None:
            raise RequestError(
                f"{language.name}: is an encoder, which takes no steps; accepted: a "
                "model that generates"
            )
        dtype = compute_dtype(backend, config.dtype)
        language = stored_for(configure(language, config), backend, dtype)
        backend = in_dtype(backend, dtype)
        config = replace(config, quantize=language.quantize)
        shaped = replace(language.config, dtype=dtype)
        cache = cache_dtype(backend, config.kv_dtype, language.checkpoint)
        model = caching_in(language.model, cache, language.checkpoint)
        ranks, mesh = planned_ranks(backend, config.division.tensor), mesh_of(backend)
        sizes = mesh.sizes if mesh else Placement()
        expert_ranks = count_expert_ranks(backend, config.division.expert)
        check_experts(model, shaped, expert_ranks)
        data_ranks = count_data_ranks(backend, config.division.data)
        if has_experts(model, shaped):
            expert_ranks *= data_ranks
        model = divisible(model, shaped, ranks)
        copies = planned_copies(config, expert_ranks, is_mesh=mesh is not None)
        tables: dict[str, HostArray] = {}
        if copies is not None:
            whole, model = model, copies.applied(model, shaped)
            tables = copies.tables(whole, shaped)
        stage = stage or Stage(count=1 if mesh else config.division.pipeline)
        adapters = config.adapter_slots if limits is None else limits.adapters
        check_stages(model, shaped, stage.count, adapters)
        selection, stored = (
            kernel_selection(backend, config),
            stored_specs(language.checkpoint) | table_specs(tables),
        )
        if stage.count > 1:
            model = stage_of(
                model, shaped, stage, collectives_of(backend), selection=selection,
                stored=stored, ranks=ranks,
            )  # fmt: skip
        unloaded = Loaded(
            model, shaped, None, None, selection, ranks,
            expert_ranks=expert_ranks, taps=language.taps, stage=stage,
            data_ranks=data_ranks, pooling=language.step_pooling,
        )  # fmt: skip
        groups = _planned(unloaded, stored, adapters)
        copied = planned_weight_copies(groups, backend, config, dtype)
        if copied:
            selection = kernel_selection(backend, config, copies=True)
            unloaded = replace(unloaded, selection=selection)
            groups = _planned(unloaded, stored, adapters)
        check_shares(groups, model.state(shaped), ranks)
        if limits is None:
            reserved = copied
            if not is_host_memory(backend):  # there, files may share it
                reserved += weight_bytes(groups, dtype)
            # The first image loads the encoder, beside a cache that is never resized.
            is_here = config.vision_backend is None and find_spec("PIL") is not None
            if language.vision and is_here and config.division.count == 1:
                reserved += vision_bytes(language.vision, dtype)
            beside = None
            if language.head is not None:
                head, beside = head_memory(language.head, shaped.dtype, selection)
                reserved += 0 if is_host_memory(backend) else head
            planned = plan_limits(
                model, shaped, backend, config, ranks=ranks, sharers=sizes.data,
                data_ranks=data_ranks, reserved=reserved, beside=beside,
            )  # fmt: skip
            planned = min_limits(
                planned, backend, stages=stage.count, data_ranks=data_ranks
            )
            limits = with_inputs(planned, model, shaped, unloaded.selection.kernels)
        return cls(
            language, backend, config, replace(unloaded, groups=groups),
            with_programs(backend, stage.limits(limits, config.depth)), cache, tables,
            copied,
        )  # fmt: skip

    @property
    def adapters(self) -> AdapterShape:
        """The room for adapters."""
        return AdapterShape(self.limits.adapters, self.limits.adapter_rank)

    @property
    def notes(self) -> tuple[str, ...]:
        """How quantized weights are loaded, a line each."""
        notes, kind = self.language.checkpoint.notes, self.language.quantize
        if self.copied_bytes:
            size = f"{self.copied_bytes / 1e9:.2f} GB"
            notes += (f"weights of 4 bits have copies in 8 bits: {size} on a device",)
        if kind is None:
            return notes
        from inl.weights.quantize.select import decoded_note

        note = decoded_note(self.unloaded.groups, kind)
        return (*notes, note) if note else notes

    def tracer(self, bucket: Bucket) -> Tracer:
        """Trace a step of ``bucket`` with the kernels that its program binds."""
        return bound_tracer(self.unloaded, bucket, self.limits)

    def describe_layers(self, bucket: Bucket) -> str:
        """Return how the backend computes all layers at once; empty if it does not."""
        whole = used_whole_models(self.backend, self.unloaded)
        if whole is None or whole.describe is None:
            return ""
        parts = self.unloaded
        return whole.describe(
            parts.model, parts.config, parts.groups, bucket, self.limits
        )

    def load(self, report: ProgressReporter, *, rank: int = 0) -> Loaded:
        """Read and pack the weights of a rank.

        report: called with (bytes done, bytes in total). Raises
        :class:`~inl.errors.RunnerError` for the plan of a rank outside of its group.
        """
        language, backend = self.language, self.backend
        dtype = self.unloaded.config.dtype
        planned = self.config.division.count > 1 and mesh_of(backend) is None
        if planned or count_ranks(backend) != self.unloaded.ranks:
            raise RunnerError(
                f"{backend.device}: found a plan for a rank of "
                f"{self.config.division.count} outside of their group; start the ranks "
                "by inl.runners.startup.start"
            )
        unloaded = self._without_copies()
        if rank == 0:
            _log_notes(language, unloaded.groups)
        collectives, expert_rank, partial_rank = collectives_of(backend), 0, 0
        if collectives is not None and unloaded.expert_ranks > 1:
            expert_rank, partial_rank = expert_part(collectives, unloaded.data_ranks)
        load = partial(
            load_weights, unloaded.groups, self._checkpoint, backend, dtype,
            rank=rank, expert_rank=expert_rank, partial_rank=partial_rank,
            check=self.config.check_weights, progress=report,
        )  # fmt: skip
        weights = self._cached(load, report)
        if rank == 0 and (quantization := language.quantization):
            log.info("%s: %s", language.name, quantization.describe())
        stacks = None
        if self.adapters.adapters:
            stacks = AdapterStacks(unloaded.groups, backend, dtype, self.adapters, rank)
            weights = stacks.attached(weights)
        return replace(unloaded, weights=weights, adapters=stacks)

    def _without_copies(self) -> Loaded:
        """Return the plan without a head that is a copy of the embedding.

        Reads both if the model is tied and the files have both; their kernels are the
        same, as their dtypes and shapes are.
        """
        parts, checkpoint = self.unloaded, self.language.checkpoint
        stored = without_copies(checkpoint, tied=getattr(parts.config, "tied", False))
        if len(stored) == len(checkpoint.names()):
            return parts
        stored |= table_specs(self.tables)
        return replace(parts, groups=_planned(parts, stored, self.limits.adapters))

    @property
    def _checkpoint(self) -> Checkpoint:
        """The checkpoint with the tables."""
        checkpoint = self.language.checkpoint
        return TablesCheckpoint(checkpoint, self.tables) if self.tables else checkpoint

    def _cached(self, load: Callable[[], Any], report: ProgressReporter) -> Any:
        """Return the weights, those of a cache of packed ones if the backend has it."""
        backend, checkpoint = self.backend, self.language.checkpoint
        packed = backend.offers(WeightCache)  # type: ignore[type-abstract]
        # Only checked weights are stored: those of the cache are not checked again.
        is_part = collectives_of(backend) is not None
        if packed is None or is_part or not self.config.check_weights:
            return load()
        opened = checkpoint.identities()
        files = {path: opened.get(path) for path in checkpoint.files()}
        forms = (
            "adapters" if self.adapters.adapters else "", self.language.quantize or "",
        )  # fmt: skip
        form = " ".join(filter(None, forms))
        variant = {"variant": form} if form else {}
        return packed.load(files, self.unloaded.config.dtype, load, report, **variant)


def _planned(parts: Loaded, stored: dict[str, Spec], adapters: int) -> Any:
    """Return the weight plans of a model, whose programs have room for adapters."""
    tree = parts.model.weights(parts.config)
    selection = parts.selection
    return plan_weights(
        with_adapters(tree) if adapters else tree, selection.kernels, stored,
        ranks=parts.ranks, expert_ranks=parts.expert_ranks,
        invariant=selection.invariant,
    )  # fmt: skip


def head_memory(head: Any, dtype: str, selection: KernelSelection) -> tuple[int, Paged]:
    """Return the bytes of a draft head's own weights, and its cache group.

    head: a :class:`~inl.speculation.draft_head.DraftHead`.
    """
    config = head.config.in_dtype(dtype)
    plans = plan_weights(
        head.module.weights(config), selection.kernels, stored_specs(head.checkpoint),
        invariant=selection.invariant,
    )  # fmt: skip
    (group,) = head.module.state(config)
    return weight_bytes(plans, dtype), group


def _log_notes(language: LanguageModel, groups: Any) -> None:
    """Log which matrices are not quantized, or not in memory."""
    if language.quantize is None:
        return
    from inl.weights.quantize.select import load_notes

    for note in load_notes(language.checkpoint, groups):
        log.warning("%s: %s", language.name, note)


def configure(language: LanguageModel, config: EngineConfig) -> LanguageModel:
    """Return the model with the settings of an engine's config.

    A model with LongRoPE has the rotation of the context that the config asks for.
    Raises :class:`~inl.errors.RequestError` for a setting that it does not have.
    """
    language = _with_context(language, config.context or 0)
    if config.mmproj is not None:
        vision = open_projector(Path(config.mmproj), language.text_file)
        if language.vision is not None:
            language.vision.checkpoint.close()
        language = replace(language, vision=vision)
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


def _with_context(language: LanguageModel, tokens: int) -> LanguageModel:
    longer = getattr(language.config, "longer", None)
    if longer is None or tokens <= language.config.max_tokens:
        return language
    limit, scaling = longer
    tokens = min(tokens, limit)
    changed = replace(language.config, max_tokens=tokens, rope_scaling=scaling)
    return replace(language, config=changed)


def planned_weight_copies(
    groups: Any, backend: Backend, config: EngineConfig, dtype: str
) -> int:
    """Return the bytes of the copies that a rank's weights have, 0 for none.

    Raises :class:`~inl.errors.RequestError` where they were asked for and the weights
    have none.
    """
    if config.weight_copies is False:
        return 0
    offered = backend.offers(WeightCopies)
    size = 0
    if offered is not None:
        specs = (plan.specs(dtype) for plan in leaves(groups) if plan.kernel)
        size = sum(map(offered.nbytes, specs))
    if config.weight_copies and not size:
        raise RequestError(
            f"EngineConfig.weight_copies: found True, but {backend.device} has no "
            "copies of these weights; accepted: None, False, or True with "
            'quantize="int4" on an NVIDIA GPU from compute capability 9.0 on'
        )
    left = backend.memory().free - weight_bytes(groups, dtype)
    left -= config.cache_bytes or 0
    return size if config.weight_copies or size <= COPIES_SHARE * left else 0


def kernel_selection(
    backend: Backend, config: EngineConfig, *, copies: bool = False
) -> KernelSelection:
    """Return the kernels that an engine may select from, with its preferences.

    copies: whether packed weights have copies, where the backend offers them.
    """
    kind = backend.device.type
    kernels = (*backend.kernels(), *registry_for(kind).kernels(kind))
    if config.quantize and (packed := backend.offers(PackedKernels)):
        kernels = (*kernels, *packed.kernels())
    if copies and (offered := backend.offers(WeightCopies)):
        copied = {(each.op, each.name, each.layout): each for each in offered.kernels()}
        kernels = tuple(
            copied.get((each.op, each.name, each.layout), each) for each in kernels
        )
    collectives = selected_collectives(backend, config.division)
    host = partial(hosted, backend)
    if collectives is not None:
        rows = count_data_ranks(backend, config.division.data)
        experts = count_expert_ranks(backend, config.division.expert) * rows
        kernels = tuple(
            over_ranks(kernels, collectives, expert_ranks=experts, data_ranks=rows)
        )
        host = partial(_hosted_on_rank, backend, collectives, experts, rows)
    return KernelSelection(
        kernels,
        host=host if config.allow_hosted else None,
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


def _hosted_on_rank(
    backend: Backend, collectives: Collectives, expert_ranks: int, data_ranks: int,
    spec: OpSpec,
) -> Callable[..., Any]:  # fmt: skip
    run = hosted(backend, spec)
    if expert_ranks == 1:
        return run
    return with_own_experts(spec, run, collectives, data_ranks)


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
