"""The dtype of the KV cache: the config's, or else what the checkpoint asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.quantized.kv_cache_scheme import CacheScheme
from inl.dtypes import E4M3
from inl.errors import CheckpointError, RequestError
from inl.spec.cache import Paged
from inl.spec.model import Model

if TYPE_CHECKING:
    from inl.backend.base import Backend, StateSpec
    from inl.checkpoints.checkpoint import Checkpoint

log = logging.getLogger("inl")

NAMES: Final = {"fp8": E4M3}
"""Names of the config -> dtypes, where they differ."""


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """The dtype of a cache, and where it is from."""

    dtype: str | None = None
    """``None`` is the compute dtype."""
    note: str = ""
    """What was asked for and is used; empty for the compute dtype if nothing else was
    asked for."""
    is_warning: bool = False
    """Whether the checkpoint asks for another dtype than is used."""


def cache_dtype(backend: Backend, wanted: str, checkpoint: Checkpoint) -> CacheDtype:
    """Resolve ``EngineConfig.kv_dtype``.

    "auto" is what the checkpoint asks for, where the backend has it. Raises
    :class:`~inl.errors.RequestError` for a dtype that the backend cannot cache.
    """
    scheme = checkpoint.cache_scheme or CacheScheme()
    if wanted != "auto":
        dtype = _served(backend, wanted)
        note = f"{wanted}, as the config says"
        return CacheDtype(dtype, note + (_scale_note(scheme) if dtype == E4M3 else ""))
    if scheme.unsupported:
        note = f"the compute dtype: {scheme.unsupported}"
        return CacheDtype(note=note, is_warning=True)
    if not scheme.asked_by:
        return CacheDtype()
    asks = f"config field {scheme.asked_by!r} asks for fp8"
    if E4M3 not in backend.traits.kv_dtypes:
        note = f"the compute dtype: {asks}, which {backend.device} does not cache in"
        return CacheDtype(note=note, is_warning=True)
    return CacheDtype(E4M3, f"fp8: {asks}{_scale_note(scheme)}")


def _served(backend: Backend, wanted: str) -> str:
    dtype, served = NAMES.get(wanted, wanted), backend.traits.kv_dtypes
    if dtype not in served:
        plain = {dtype: name for name, dtype in NAMES.items()}
        others = ", ".join(("auto", *(plain.get(each, each) for each in served)))
        raise RequestError(
            f"kv_dtype: found {wanted!r}, {backend.device} accepts {others}; "
            "auto caches in the dtype that it computes in, or that the checkpoint asks "
            "for"
        )
    return dtype


def _scale_note(scheme: CacheScheme) -> str:
    if not scheme.scales:
        return "; all scales are 1, since the checkpoint has none"
    return f"; scales of {len(scheme.scales)} layers are those of the checkpoint"


def caching_in(model: Model, chosen: CacheDtype, checkpoint: Checkpoint) -> Model:
    """Return the model with keys and values cached in another dtype.

    Its ``state`` raises :class:`~inl.errors.CheckpointError` for a layer without scales
    among others.
    """
    if chosen.is_warning:
        log.warning("%s: KV cache: %s", checkpoint.path, chosen.note)
    if chosen.dtype is None:
        return model
    if chosen.dtype == E4M3:
        log.info("%s: KV cache: %s", checkpoint.path, chosen.note)
    return replace(
        model, state=partial(_state_in, model.state, chosen.dtype, checkpoint)
    )


def _state_in(
    state: Callable[[Any], StateSpec], dtype: str, checkpoint: Checkpoint, config: Any
) -> StateSpec:
    scheme = checkpoint.cache_scheme if dtype == E4M3 else None

    def change(item: Paged) -> Paged:
        try:
            scales = scheme.layer_scales(item.layers) if scheme else ()
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from None
        return item._replace(dtype=dtype, scales=scales)

    return tuple(
        change(item) if isinstance(item, Paged) else item for item in state(config)
    )
