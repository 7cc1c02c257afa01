"""What a kernel is: one way to compute an op, with its refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inl.dtypes import HostArray

PLAIN = "plain"
"""Layout of weights that no kernel has packed: the group's own tuple of tensors."""


def accepts(*_specs: Any, **_attrs: Any) -> str | None:
    """Refuse nothing."""
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one op, named by its technology: ``attention/triton``."""

    op: str
    name: str
    run: Callable[..., Any]
    """Same parameters as the op's body, without ``ops``."""
    refuse: Callable[..., str | None] = accepts
    """(specs and attributes of the call) -> ``None`` or a sentence."""
    layout: str = PLAIN
    """Layout of the weights that it takes."""
    pack: Callable[[Mapping[str, HostArray | None], Any, str], Any] | None = None
    """(logical group, backend, dtype) -> a tuple of tensors in ``layout``."""
    can_pack: Callable[..., str | None] = accepts
    """(the group's stored specs by name) -> ``None``, or why it cannot lay them out."""
    plan: Callable[..., Any] | None = None
    """(step, *, block_size) -> what all layers share, found in ``step.plan[label]``."""
    invariant: bool = False
    """Gives the same bits whatever else is in the batch."""
    activation_quant: str = ""
    """How it may round what packed weights multiply, a name in
    :data:`inl.spec.activation_quant.INPUTS`; empty: no coarser than storage."""
    capturable: bool = True
    """Never waits for the device nor branches on its data."""
    preference: int = 0
    """Declared rank among the kernels that accept; the highest wins."""
    config: Mapping[str, int] = field(default_factory=dict)
    """Tunables, apart from the code."""

    @property
    def label(self) -> str:
        """``op/technology``."""
        return f"{self.op}/{self.name}"
