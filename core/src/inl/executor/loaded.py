"""A model whose weights are on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inl.executor.pipeline import WHOLE, Stage
from inl.executor.tracing import trace
from inl.spec.cache import Paged
from inl.spec.model import Model
from inl.spec.selection import KernelSelection

if TYPE_CHECKING:
    from inl.adapters.stacks import AdapterStacks
    from inl.spec.dispatch import Choices, Tracer
    from inl.spec.limits import Limits
    from inl.spec.step import Bucket


@dataclass(frozen=True)
class Loaded:
    """A model with its weights on a device."""

    model: Model
    config: Any
    groups: Any
    """Tree of :class:`~inl.weights.plan.WeightPlan`, parallel to ``weights``."""
    weights: Any
    """``None`` before they are loaded, and once they are released."""
    selection: KernelSelection
    ranks: int = 1
    adapters: AdapterStacks | None = None
    """Adapters of the weights, if they have room for any."""
    taps: tuple[int, ...] = ()
    """Layers whose inputs a step also returns, see :mod:`inl.executor.taps`."""
    data_ranks: int = 1
    """Ranks that divide the rows of a step."""
    expert_ranks: int = 1
    """Number of devices that share the experts."""
    ends_before_head: bool = False
    """Whether the model returns hidden states, see
    :mod:`inl.executor.hidden_states`."""
    stage: Stage = WHOLE
    """The part of the pipeline that the model is."""
    pooling: str = "last"
    """What a pooled step returns of each row: the hidden state of its "last" token, or
    the "mean" of its tokens'."""

    def tracer(
        self,
        bucket: Bucket,
        limits: Limits,
        *,
        table_width: int | None = None,
        choices: Choices | None = None,
        is_scored: bool = False,
    ) -> Tracer:
        """Trace a step of ``bucket``, see :func:`~inl.executor.tracing.trace`."""
        return trace(
            self.model, self.config, self.groups, bucket, limits, self.selection,
            ranks=self.ranks, table_width=table_width, taps=self.taps, choices=choices,
            is_scored=is_scored,
            is_mean=self.ends_before_head and self.pooling == "mean",
        )  # fmt: skip

    def shard_state(self) -> tuple[Any, ...]:
        """Return the specs of the model's state on one rank."""

        def shard(item: Any) -> Any:
            if isinstance(item, Paged):
                return item._replace(kv_heads=item.kv_heads // self.ranks)
            return item

        return tuple(shard(item) for item in self.model.state(self.config))
