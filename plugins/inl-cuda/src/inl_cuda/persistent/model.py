"""A model whose steps of one row are one persistent kernel.

The model's functions are replaced (:class:`~inl.backend.provisional.WholeModels`): for
a step of one row, ``embed`` looks up the row, ``layer`` collects the caches, and
``head`` launches the kernel. All other steps call the model's own functions.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import torch

from inl.errors import DeviceError
from inl.spec.cache import State
from inl.spec.limits import Limits
from inl.spec.model import Model
from inl.spec.step import Bucket, Step
from inl_cuda.persistent.program import PersistentStep, resident_clusters
from inl_cuda.persistent.shape import (
    Launch,
    Shape,
    plan_launch,
    refuse_config,
    refuse_state,
    shape_of,
)
from inl_cuda.persistent.weights import refuse_layouts, refuse_weights

LOGGER = logging.getLogger(__name__)

MOST_CLUSTERS = 16
"""Clusters of the largest chip; fewer may be resident."""


class RowCarry(NamedTuple):
    """What the kernel of a step needs, collected on the way through the layers."""

    row: torch.Tensor
    """[1, H] embedding."""
    cos: torch.Tensor
    """[1, 32] float32."""
    sin: torch.Tensor
    """[1, 32] float32."""
    caches: tuple[Any, ...] = ()
    """Those of the layers so far."""


def persistent_model(model: Model, *, pdl: bool) -> Model:
    """Return a model with the same weights, state and results.

    pdl: whether kernels may start before the previous one ends.
    """
    steps = PersistentSteps(model, pdl=pdl)

    @wraps(model.layer)
    def layer(
        ops: Any, config: Any, w: Any, carry: Any, step: Step, state: State, *,
        index: int, **options: Any,
    ) -> tuple[Any, State]:  # fmt: skip
        if isinstance(carry, RowCarry):
            return carry._replace(caches=(*carry.caches, state.caches[index])), state
        return model.layer(ops, config, w, carry, step, state, index=index, **options)

    def head(ops: Any, config: Any, w: Any, carry: Any, step: Step) -> Any:
        if isinstance(carry, RowCarry):
            return steps.logits(carry, step)
        return model.head(ops, config, w, carry, step)

    return replace(model, embed=steps.embed, layer=layer, head=head)


class PersistentSteps:
    """The persistent kernel of a model, made for the first step of one row."""

    def __init__(self, model: Model, *, pdl: bool) -> None:
        self._model, self._pdl = model, pdl
        self._weights: Any = None
        self._program: PersistentStep | None = None

    def embed(self, ops: Any, config: Any, w: Any, step: Step) -> Any:
        """Return the carry of a step: a :class:`RowCarry` if the kernel computes it."""
        if not is_one_row(ops.bucket) or not self._is_taken(
            config, w, step, ops.block_size
        ):
            return self._model.embed(ops, config, w, step)
        row = ops.embedding(step.tokens, w.embed)
        rotation = ops.rope_table(
            step.positions, dim=config.head_dim, theta=config.rope_theta,
            scaling=config.rope_scaling,
        )  # fmt: skip
        return RowCarry(row, *rotation)

    def logits(self, carry: RowCarry, step: Step) -> torch.Tensor:
        """Compute the layers and the head of a step."""
        assert self._program is not None, "embed has made it"
        return self._program.logits(*carry, step)

    def _is_taken(self, config: Any, w: Any, step: Step, page: int) -> bool:
        """Whether the kernel computes steps of one row; makes it at the first call."""
        if w is not self._weights:
            made = self._make(config, w, step, page)
            self._weights = w
            self._program = None if isinstance(made, str) else made
            if self._program is None:
                LOGGER.info("steps of one row are a graph of kernels: %s", made)
            else:
                LOGGER.info("steps of one row are %s", self._program.describe())
        return self._program is not None

    def _make(self, config: Any, w: Any, step: Step, page: int) -> PersistentStep | str:
        """Return the kernel, or the reason why it does not take the model."""
        model = self._model
        reason = refuse_config(model, config) or refuse_state(model.state(config))
        if reason := reason or refuse_weights(w):
            return reason
        shape = shape_of(config, page, step.blocks.shape[-1])
        try:
            launch = self._resident_launch(shape, step)
            if isinstance(launch, str):
                return launch
            scale = config.attention_scale or config.head_dim**-0.5
            return PersistentStep(
                w, shape, launch, eps=config.norm_eps, scale=scale, pdl=self._pdl
            )
        except (DeviceError, torch.cuda.OutOfMemoryError) as error:
            return str(error)

    def _resident_launch(self, shape: Shape, step: Step) -> Launch | str:
        """Return a launch all of whose clusters are resident at the same time."""
        launch = plan_launch(shape, MOST_CLUSTERS)
        while not isinstance(launch, str):
            resident = resident_clusters(shape, launch, step, pdl=self._pdl)
            if resident >= launch.clusters:
                break
            launch = plan_launch(shape, min(resident, launch.clusters - 1))
        return launch


def describe_step(
    model: Model, config: Any, plans: Any, bucket: Bucket, limits: Limits
) -> str:
    """Say whether the kernel computes a step of a model, see ``inl explain``."""
    reason: str | None = "takes steps of one token"
    if is_one_row(bucket):
        reason = refuse_config(model, config) or refuse_state(model.state(config))
        reason = reason or refuse_layouts(plans)
    if reason is None:
        shape = shape_of(config, limits.block_size, limits.max_blocks_per_seq)
        launch = plan_launch(shape, MOST_CLUSTERS)
        if not isinstance(launch, str):
            return f"one persistent kernel of {launch.blocks} blocks"
        reason = launch
    return f"by op; not one persistent kernel: {reason}"


def is_one_row(bucket: Bucket) -> bool:
    """Whether a step computes and samples one token."""
    return (bucket.tokens, bucket.tokens_per_row, bucket.repeat) == (1, 1, 1)
