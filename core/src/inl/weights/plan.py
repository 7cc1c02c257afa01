"""Which layout each weight group gets, and which tensors that needs; no bytes read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inl.dtypes import SIZES
from inl.errors import NoKernel, WeightMismatch
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.op import CATALOG, Spec
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Group, Param
from inl.weights.quant import packed_bytes
from inl.weights.sources import resolved, stored_spec, stored_tensors

IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensor names that follow from the config."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One group and the kernel that lays its tensors out; ``None`` is plain."""

    group: Group
    kernel: Kernel | None
    ranks: int = 1
    stored: Mapping[str, str] = field(default_factory=dict)
    """Dtype in the checkpoint, by parameter name."""

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return self.kernel.layout if self.kernel else PLAIN

    def specs(self, dtype: str) -> Any:
        """The group's logical tensors on one rank, as its op's weights type."""
        weights = _weights_type(self.group)
        shapes = {
            name: StrictArray(
                self.shard(param),
                dtype,
                layout=self.layout,
                stored_bytes=self._stored_bytes(name),
            )
            for name, param in self.group.params.items()
        }
        return weights(**shapes)

    def _stored_bytes(self, name: str) -> int | None:
        """Checkpoint bytes of a quantized tensor on one rank, if a kernel packs it."""
        param, dtype = self.group.params[name], self.stored.get(name, "float32")
        if self.kernel is None or dtype in SIZES:
            return None
        parts = 1 if param.axis is None else self.ranks
        return packed_bytes(param.shape, dtype) // parts

    def shard(self, param: Param) -> tuple[int, ...]:
        """Shape of one rank's part; raises where ranks do not divide the axis."""
        if param.axis is None or self.ranks == 1:
            return param.shape
        size = param.shape[param.axis]
        if size % self.ranks:
            raise WeightMismatch(
                f"tensor {param.source}: axis {param.axis} has {size} entries, "
                f"which {self.ranks} ranks cannot share evenly"
            )
        part = list(param.shape)
        part[param.axis] = size // self.ranks
        return tuple(part)


def plan_weights(
    tree: Any,
    kernels: tuple[Kernel, ...],
    stored: Mapping[str, Spec],
    *,
    ranks: int = 1,
) -> Any:
    """Choose a layout for every group of a model's weight tree.

    stored: what the checkpoint holds, by name (quantized dtypes under their names).
    """

    def plan(group: Group) -> WeightPlan:
        found = resolved(group.params, stored)
        group = Group(group.op, **found)
        specs = {name: stored_spec(param, stored) for name, param in found.items()}
        willing = [
            kernel
            for kernel in kernels
            if kernel.op == group.op and kernel.can_pack(**specs) is None
        ]
        best = max(willing, key=lambda kernel: kernel.preference, default=None)
        kernel = best if best and best.pack else None
        dtypes = {name: spec.dtype for name, spec in specs.items()}
        return WeightPlan(group, kernel, ranks, dtypes)

    return tree_map(plan, tree)


def check_tensors(tree: Any, stored: Mapping[str, Spec], where: str) -> None:
    """Compare what a model needs with what there is; names every difference."""
    problems: list[str] = []
    needed: set[str] = set()
    for planned in leaves(tree):
        for source, shape, optional in _sources(planned.group):
            if source in needed:
                continue
            needed.add(source)
            found = stored.get(source)
            if found is None and not optional:
                problems.append(f"missing {source} {list(shape)}")
            elif found is not None and found.shape != shape:
                problems.append(
                    f"{source} has shape {list(found.shape)}, expected {list(shape)}"
                )
    unused = sorted(set(stored) - needed)
    if "lm_head.weight" in unused and "model.embed_tokens.weight" in needed:
        unused.remove("lm_head.weight")  # tied checkpoints often carry the copy
    problems += [f"unused {name}" for name in unused if not name.endswith(IGNORED)]
    if problems:
        shown = problems[:20]
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = "\n  ".join(shown + more)
        raise WeightMismatch(f"{where}: tensors do not fit the config\n  {lines}")


def _sources(group: Group) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Stored tensors of a group: name, shape, and whether it may be absent."""
    for param in group.params.values():
        for source, shape in stored_tensors(param).items():
            yield source, shape, param.optional


def _weights_type(group: Group) -> Any:
    spec = CATALOG.get(group.op)
    if spec is None or spec.weights is None:
        raise NoKernel(f"group names op {group.op!r}, which takes no weights")
    return spec.weights
