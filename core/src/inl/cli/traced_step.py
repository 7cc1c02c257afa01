"""A traced step of an engine, which ``inl explain`` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from inl.backend.base import Ranks
from inl.backend.collectives import TENSOR
from inl.errors import BackendUnavailable, RequestError
from inl.executor.load_plan import LoadPlan, configure
from inl.executor.model_executor import bound_tracer
from inl.plugin import host_entry, make_backend
from inl.runners.rank_startup import RANK_AXES, check_rows
from inl.runners.startup import check_axes, has_ranks, over_mesh
from inl.scheduling.buckets import Buckets
from inl.spec.dispatch import Tracer
from inl.spec.step import Bucket

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.spec.limits import Limits


class ExplainedStep(NamedTuple):
    """A step of an engine, traced with the kernels that its program binds."""

    plan: LoadPlan
    tracer: Tracer
    draft_head: Tracer | None = None
    """Both steps of the draft head."""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.plan.limits.max_blocks_per_seq * self.plan.limits.block_size


def open_backend(config: EngineConfig) -> Backend:
    """Open the device, or the mesh, of an engine's config.

    Raises :class:`~inl.errors.BackendUnavailable` for a device without ranks or meshes,
    and :class:`~inl.errors.RequestError` for axes that do not go together.
    """
    backend = make_backend(config.backend)
    placement = config.division
    if placement.hosts > 1:
        # The program of a device is the same, whichever host has it; where only tensors
        # are divided, one device shows it.
        host_entry(backend.device, placement)
        alone = placement.axes == ((TENSOR, placement.count),)
        return backend if alone else over_mesh(backend, replace(placement, hosts=1))
    if not has_ranks(config):
        return over_mesh(backend, placement)
    if backend.offers(Ranks) is None:
        raise BackendUnavailable(
            f"{backend.device}: {type(backend).__name__} does not support "
            f"{placement.count} ranks; accepted: tensor_parallel=1"
        )
    check_axes(str(backend.device), placement, RANK_AXES)
    check_rows(placement, config)
    return backend


def explain_step(
    language: LanguageModel, backend: Backend, config: EngineConfig, size: Bucket
) -> ExplainedStep:
    """Trace the step of an engine that has the tokens and rows of ``size``.

    Its batch and budget are at least those of ``size``. Of a tensor-parallel group it
    is the step of a rank. Raises :class:`~inl.errors.RequestError` where programs have
    room for fewer tokens or rows, and as
    :meth:`~inl.executor.load_plan.LoadPlan.of` does.
    """
    traits = backend.traits
    config = replace(
        config, max_batch=max(size.rows, traits.max_batch),
        token_budget=max(size.tokens, traits.token_budget),
    )  # fmt: skip
    from inl.speculation.draft_head import find_head, head_limits, plan_head
    from inl.speculation.setup import check_speculation, head_place

    head = find_head(language, config)
    if head is None:
        plan = LoadPlan.of(language, backend, config)
        return ExplainedStep(plan, plan.tracer(_program(plan.limits, size)))
    language = configure(language, config)
    check_speculation(language, config)
    tapped = replace(language, taps=head.config.taps, head=head)
    plan = LoadPlan.of(tapped, backend, config)
    place = head_place(language.name, config, plan.limits)
    limits = head_limits(head, plan.backend, plan.limits, **place)
    own = _program(limits, size._replace(sampler="greedy"))
    return ExplainedStep(
        plan, plan.tracer(_program(plan.limits, size)),
        bound_tracer(plan_head(head, plan.unloaded), own, limits),
    )  # fmt: skip


def _program(limits: Limits, size: Bucket) -> Bucket:
    """Return the bucket of the program that an engine uses for a step."""
    rows = limits.slots - 1
    sizes = Buckets(limits, token_budget=limits.token_budget, max_rows=rows)
    if size.tokens > sizes.tokens or size.rows > sizes.rows:
        raise RequestError(
            f"step: found {size.tokens} tokens in {size.rows} rows, accepted: up to "
            f"{sizes.tokens} tokens and {sizes.rows} rows on this device"
        )
    return sizes.choose(size.tokens, size.rows, size.sampler)
