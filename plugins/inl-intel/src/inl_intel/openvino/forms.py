"""The forms of a graph, by device: with paged attention on CPUs, gathered elsewhere."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Final

from inl_intel.openvino import gathered, paged
from inl_intel.openvino.kernels import kernels
from inl_intel.openvino.model import Form

if TYPE_CHECKING:
    from inl.spec.step import Step
    from inl_intel.openvino.runtime import Runtime

DECODES: Final = (1,)
"""Rows of decoding steps with gathered keys; the largest batch is added."""

PREFILLS: Final = (64, 256)
"""Tokens of their steps that include prompts."""

CONTEXTS: Final = (256, 1024, 4096)
"""Tokens of the longest sequence of their steps; the limit is added."""


def is_paged(runtime: Runtime) -> bool:
    """Whether the device has paged attention that reads host memory."""
    return runtime.kind == "CPU"


def form_of(runtime: Runtime, *, pages: bool) -> Form:
    """Return the form of a device's graphs.

    pages: whether they have paged attention, see :func:`is_paged`.
    """
    if pages:
        return Form(
            kernels(runtime, paged.refuse),
            lambda _step: paged.PagedGraph(),
            partial(paged.PagedModel, runtime=runtime),
            lambda _step: None,
        )
    return Form(
        kernels(runtime, None),
        gathered.GatheredGraph,
        partial(gathered.GatheredModel, runtime=runtime),
        sizes,
    )


def sizes(step: Step) -> Hashable:
    """Return the sizes of a step that a graph with static shapes is made for."""
    return len(step.tokens), len(step.samples), step.blocks.shape
