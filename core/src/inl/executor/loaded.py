"""A model whose weights are on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inl.spec.cache import Paged
from inl.spec.model import Model
from inl.spec.selection import KernelSelection

if TYPE_CHECKING:
    from inl.adapters.stacks import AdapterStacks


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights on a device."""

    model: Model
    config: Any
    groups: Any
    """Tree of :class:`~inl.weights.plan.WeightPlan`, parallel to ``weights``."""
    weights: Any
    selection: KernelSelection
    ranks: int = 1
    adapters: AdapterStacks | None = None
    """Adapters of the weights, if they have room for any."""
    taps: tuple[int, ...] = ()
    """Layers whose inputs a step also returns, see :mod:`inl.executor.taps`."""

    def shard_state(self) -> tuple[Any, ...]:
        """Return the specs of the model's state on one rank."""

        def shard(item: Any) -> Any:
            if isinstance(item, Paged):
                return item._replace(kv_heads=item.kv_heads // self.ranks)
            return item

        return tuple(shard(item) for item in self.model.state(self.config))
