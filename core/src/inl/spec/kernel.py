"""Kernel description: an implementation of an op and the calls that it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inl.dtypes import HostArray

PLAIN = "plain"
"""Layout of unpacked weights: the op's own tuple of tensors."""


HostGroup = Mapping[str, HostArray | None]
"""Logical tensors of a group by name, as stored; ``None`` for an absent one."""


def accepts(*_specs: Any, **_attrs: Any) -> str | None:
    """Accept every call: the default of :attr:`Kernel.refuse`."""
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one op, named by its technology: ``attention/triton``."""

    op: str
    name: str
    """What runs: languages and libraries, joined by ``+`` where the kernel launches
    several of them, and after an underscore what tells it from others of the same op:
    ``triton``, ``triton+eager``, ``cuda_float8``."""
    run: Callable[..., Any]
    """Computes the op. Same parameters as the op's body, without ``ops``."""
    refuse: Callable[..., str | None] = accepts
    """(specs and attributes of the call) -> ``None`` if the kernel supports the call,
    else the reason as a sentence."""
    layout: str = PLAIN
    """Layout of the weights that the kernel takes."""
    pack: Callable[[Mapping[str, HostArray | None], Any, str], Any] | None = None
    """(group, backend, dtype) -> a tuple of tensors in ``layout``, whose type
    :func:`~inl.spec.weights.in_layout` makes. group: a mapping from each field of the
    model's group to its :class:`~inl.dtypes.HostArray` as it is stored, the rank's
    share of it, or ``None`` for a tensor that the checkpoint lacks."""
    can_pack: Callable[..., str | None] = accepts
    """(weight=spec, bias=spec, ...) -> ``None`` if ``pack`` supports such a group, else
    the reason. Asked before data is read: in place of a mapping to arrays it gets, by
    keyword, the :class:`~inl.spec.op.Spec` of each tensor with the dtype that is stored
    and the shape before ranks share it; float32 for one that the checkpoint lacks.
    Fields that the model does not have are left out."""
    plan: Callable[..., Any] | None = None
    """(step, *, block_size) -> work shared by all layers of a step, which the kernel
    reads from ``step.plan[label]``."""
    invariant: bool = False
    """Whether a row's result has the same bits whatever else is in the batch."""
    activation_quant: str = ""
    """Rounding applied to the inputs of products with packed weights: a name in
    :data:`inl.spec.activation_quant.ACTIVATION_QUANTS`. Empty: none beyond storage."""
    note: str = ""
    """What else users should know of its precision, shown by ``inl explain``."""
    preference: int = 0
    """Rank among the kernels that support a call; the highest wins."""
    config: Mapping[str, int] = field(default_factory=dict)
    """Tunable parameters, such as tile sizes."""
    run_part: Callable[..., Any] | None = None
    """For ``experts`` and ``expert_linear``: as ``run``, with the weights of a part of
    the experts. Ids outside of 0 to E - 1 are those of other ranks' experts, whose
    slots have results of zero. ``None``: experts cannot be divided among ranks."""

    @property
    def technologies(self) -> tuple[str, ...]:
        """Languages and libraries that the kernel may use, from its name."""
        return tuple(self.name.partition("_")[0].split("+"))

    @property
    def label(self) -> str:
        """``op/technology``."""
        return f"{self.op}/{self.name}"
