"""Weight plan: chooses the layout of each weight group without reading data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inl.checkpoints.blocks.dtypes import BLOCKS, packed_bytes
from inl.dtypes import SIZES
from inl.errors import NoKernel, WeightMismatch
from inl.placement.mesh import EXPERT, EXPERT_OPS, TENSOR, axes_of
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.op import CATALOG, Spec
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Group, Param
from inl.weights.sources import resolved, stored_spec, stored_tensors

TABLE_OPS = ("place_experts",)
"""Ops whose weights are tables in the dtype that is stored."""

COMPUTED = (
    "rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "rotary_emb.cos_cached",
    "rotary_emb.sin_cached", "attn.masked_bias",
)  # fmt: skip
"""Name suffixes of tensors that are computed from the config instead."""

DRAFTING = ("mtp.", "model.mtp.", "model.mtp_layers.")
"""Name prefixes of layers that predict further tokens, beside those of a model."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """A weight group and the kernel that packs it; ``None`` for the plain layout."""

    group: Group
    kernel: Kernel | None
    ranks: int = 1
    stored: Mapping[str, str] = field(default_factory=dict)
    """Dtype in the checkpoint, by parameter name."""
    expert_ranks: int = 1
    """Number of devices that share the experts, axis 0 of each parameter."""

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return self.kernel.layout if self.kernel else PLAIN

    def specs(self, dtype: str) -> Any:
        """Return the specs of one rank's logical tensors, as the op's weights type."""
        weights = _weights_type(self.group)
        shapes = {
            name: StrictArray(
                self.shard(param),
                self._dtype(name, param, dtype),
                layout=self.layout,
                stored_bytes=self._stored_bytes(name),
            )
            for name, param in self.group.params.items()
        }
        return weights(**shapes)

    def _dtype(self, name: str, param: Param, dtype: str) -> str:
        if self.group.op in TABLE_OPS:
            return self.stored[name]
        return "float32" if param.wide else dtype

    def _stored_bytes(self, name: str) -> int | None:
        """Checkpoint bytes of a quantized tensor on one rank, if a kernel packs it.

        ``None`` too for a shard of columns that would split a block, which the loader
        decodes.
        """
        param, dtype = self.group.params[name], self.stored.get(name, "float32")
        if self.kernel is None or dtype in SIZES:
            return None
        shape, (elements, _) = self.shard(param), BLOCKS.get(dtype, (1, 1))
        if shape[-1] != param.shape[-1] and shape[-1] % elements:
            return None
        parts = (1 if param.axis is None else self.ranks) * self.expert_ranks
        return packed_bytes(param.shape, dtype) // parts

    def shard(self, param: Param) -> tuple[int, ...]:
        """Return the shape of one rank's shard.

        Raises :class:`~inl.errors.WeightMismatch` if the ranks do not divide the axis.
        """
        counts = {TENSOR: self.ranks, EXPERT: self.expert_ranks, None: 1}
        shape = list(param.shape)
        for axis, name in enumerate(self.axes(param)):
            if shape[axis] % counts[name]:
                raise WeightMismatch(
                    f"tensor {param.source}: axis {axis}: found {shape[axis]} entries; "
                    f"accepted: a multiple of {counts[name]}, the number of ranks"
                )
            shape[axis] //= counts[name]
        return tuple(shape)

    def axes(self, param: Param) -> tuple[str | None, ...]:
        """Return the mesh axis that divides each axis of a parameter, or ``None``."""
        expert_axis = 0 if self.expert_ranks > 1 else None
        tensor_axis = param.axis if self.ranks > 1 else None
        return axes_of(param.shape, tensor_axis, expert_axis)

    @property
    def whole(self) -> WeightPlan:
        """The plan of the undivided tensors."""
        return replace(self, ranks=1, expert_ranks=1)


def plan_weights(
    tree: Any,
    kernels: tuple[Kernel, ...],
    stored: Mapping[str, Spec],
    *,
    ranks: int = 1,
    expert_ranks: int = 1,
    invariant: bool = False,
) -> Any:
    """Choose a layout for every group of a model's weight tree.

    Selects the kernel with the highest preference that can pack the group. stored:
    specs of the checkpoint's tensors, by name. expert_ranks: number of devices that
    share the experts of a layer. invariant: whether to choose only layouts that a
    batch-invariant kernel takes.
    """
    accepted = [one for one in kernels if one.invariant] if invariant else []
    served = {(one.op, one.layout) for one in accepted}

    def plan(group: Group) -> WeightPlan:
        params = resolved(group.params, stored)
        group = Group(group.op, **params)
        specs = {name: stored_spec(param, stored) for name, param in params.items()}
        candidates = [
            kernel
            for kernel in kernels
            if kernel.op == group.op
            and kernel.can_pack(**specs) is None
            and (not invariant or (kernel.op, kernel.layout) in served)
        ]
        best = max(candidates, key=lambda kernel: kernel.preference, default=None)
        packing = best if best and best.pack else None
        dtypes = {name: spec.dtype for name, spec in specs.items()}
        shares = expert_ranks if group.op in EXPERT_OPS else 1
        return WeightPlan(group, packing, ranks, dtypes, shares)

    return tree_map(plan, tree)


def check_tensors(tree: Any, stored: Mapping[str, Spec], where: str) -> None:
    """Compare the tensors that a model needs with those of the checkpoint.

    Raises :class:`~inl.errors.WeightMismatch` that lists the differences.
    """
    problems: list[str] = []
    needed: set[str] = set()
    for planned in leaves(tree):
        for source, shape, optional in _sources(planned.group):
            if source in needed:
                continue
            needed.add(source)
            spec = stored.get(source)
            if spec is None and not optional:
                problems.append(f"missing {source} {list(shape)}")
            elif spec is not None and spec.shape != shape:
                problems.append(
                    f"{source} has shape {list(spec.shape)}, expected {list(shape)}"
                )
    problems += [
        f"unused {name}"
        for name in sorted(set(stored) - needed)
        if not name.endswith(COMPUTED) and not name.startswith(DRAFTING)
    ]
    if problems:
        shown = problems[:20]
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = "\n  ".join(shown + more)
        raise WeightMismatch(f"{where}: tensors do not fit the config\n  {lines}")


def _sources(group: Group) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield name, shape and optionality of the stored tensors of a group."""
    for param in group.params.values():
        for source, shape in stored_tensors(param).items():
            yield source, shape, param.optional


def _weights_type(group: Group) -> Any:
    spec = CATALOG.get(group.op)
    if spec is None or spec.weights is None:
        raise NoKernel(f"weight group of op {group.op!r}: the op takes no weights")
    return spec.weights
