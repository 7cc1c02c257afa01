"""A traced step of a model, which ``inl explain`` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from inl.backend.base import WholeModels
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.cache_dtype import cache_dtype, caching_in
from inl.executor.cache_sizing import plan_limits
from inl.executor.model_loader import (
    compute_dtype,
    in_dtype,
    kernel_selection,
    open_model,
    stored_for,
)
from inl.executor.tracing import trace
from inl.plugin import make_backend
from inl.spec.dispatch import Tracer
from inl.spec.step import Bucket
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights
from inl.weights.quantize.select import decoded_note

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.config import EngineConfig


class TracedStep(NamedTuple):
    """A traced step and what its costs depend on."""

    tracer: Tracer
    backend: Backend
    context: int
    """Tokens of the longest sequence."""
    notes: tuple[str, ...] = ()
    """How quantized weights are loaded."""
    cache: str = ""
    """The dtype of the KV cache and who asks for it; empty for the compute dtype."""
    layers: str = ""
    """How the backend computes all layers at once, or why it does not."""


def trace_step(model: str | None, config: EngineConfig, bucket: Bucket) -> TracedStep:
    """Trace a step of a model, whose weights are not loaded.

    Raises the errors of opening the device and the model.
    """
    backend = make_backend(config.backend)  # raises before a model is downloaded
    language = open_model(resolve_model(model))
    dtype = compute_dtype(backend, config.dtype)
    if config.quantize is not None:
        language = language.quantized(config.quantize)
    language = stored_for(language, backend, dtype)
    backend = in_dtype(backend, dtype)
    shaped = replace(language.config, dtype=dtype)
    selection = kernel_selection(backend, config)
    stored = stored_specs(language.checkpoint)
    groups = plan_weights(language.model.weights(shaped), selection.kernels, stored)
    cache = cache_dtype(backend, config.kv_dtype, language.checkpoint)
    cached = caching_in(language.model, cache, language.checkpoint)
    limits = plan_limits(cached, shaped, backend, config)
    tracer = trace(cached, shaped, groups, bucket, limits, selection)
    context = limits.max_blocks_per_seq * limits.block_size
    notes = language.checkpoint.notes
    if language.quantize and (note := decoded_note(groups, language.quantize)):
        notes = (*notes, note)
    whole, layers = backend.offers(WholeModels), ""
    if whole is not None and whole.describe is not None:
        layers = whole.describe(cached, shaped, groups, bucket, limits)
    return TracedStep(tracer, backend, context, notes, cache.note, layers)
