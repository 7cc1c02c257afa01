"""Weights that products stream as they are stored: containers, and their packing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from inl.dtypes import SIZES, HostArray
from inl.ops.linear import Linear
from inl.spec.kernel import HostGroup
from inl.spec.op import Spec
from inl.spec.strict_array import StrictArray
from inl.spec.weights import in_layout
from inl.weights.load import to_dtype
from inl.weights.packing import present
from inl_torch.eager.linear import StackedQkv, can_stack_qkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.quantized.packed import stack_biases

WIDEST: Final = 1 << 16
"""Most columns of a matrix: one program reads a row of activations."""

ROWS: Final = 1024
"""Rows that are converted at once, which bounds the temporary memory."""


class Matrix(Protocol):
    """A matrix [N, K]."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""


class Plain(NamedTuple):
    """A matrix [N, K] in the compute dtype: blocks of its file end within a shard."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.weight.shape[0], self.weight.shape[1]


Refuse = Callable[..., str | None]
Stack = Callable[[Sequence[HostArray], Any], Any]
"""Packs matrices as one, stacked by rows, on a backend."""


def matrices(stored: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the matrices among the parts of a group of weights."""
    return {name: one for name, one in stored.items() if not name.endswith("bias")}


def is_decoded(spec: Any) -> bool:
    """Whether the matrix of a traced spec is :class:`Plain`."""
    return isinstance(spec, StrictArray) and spec.stored_bytes is None


def refuse_width(stored: Mapping[str, Spec]) -> str | None:
    """Refuse rows that do not fit one program."""
    for name, spec in matrices(stored).items():
        if spec.shape[1] > WIDEST:
            return f"{name} has {spec.shape[1]} columns, takes {WIDEST} at most"
    return None


def joined(parts: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Join the fields of stacked matrices."""
    return [torch.cat(field) for field in zip(*parts, strict=True)]


def packers(
    layout: str, refuse: Refuse, stack: Stack
) -> dict[str, tuple[Callable[..., Any], Refuse]]:
    """Return, by op, functions that pack its weights and why they cannot be."""

    def refuse_qkv(**stored: Spec) -> str | None:
        return refuse(**stored) or can_stack_qkv(**stored)

    linear = partial(pack_linear, in_layout(layout)(Linear), stack)
    qkv = partial(pack_qkv, in_layout(layout)(StackedQkv), stack)
    mlp = partial(pack_mlp, in_layout(layout)(StackedMlp), stack)
    return {
        "linear": (linear, refuse),
        "qkv_linear": (qkv, refuse_qkv),
        "gated_mlp": (mlp, refuse),
    }


def pack_linear(
    make: type[Linear], stack: Stack, group: HostGroup, backend: Any, dtype: str
) -> Linear:
    matrix = _shard(group["weight"], backend, dtype, stack)
    return make(matrix, stack_biases([group.get("bias")], [0], backend, dtype))


def pack_qkv(
    make: type[StackedQkv], stack: Stack, group: HostGroup, backend: Any, dtype: str
) -> StackedQkv:
    parts = [present(group[name]) for name in "qkv"]
    matrix = stack(parts, backend)
    rows = [part.shape[0] for part in parts]
    biases = [group.get(f"{name}_bias") for name in "qkv"]
    keys = matrix.codes[rows[0] : rows[0] + rows[1]]
    return make(matrix, keys, stack_biases(biases, rows, backend, dtype))


def pack_mlp(
    make: type[StackedMlp], stack: Stack, group: HostGroup, backend: Any, dtype: str
) -> StackedMlp:
    gate_up = stack([present(group["gate"]), present(group["up"])], backend)
    return make(gate_up, _shard(group["down"], backend, dtype, stack))


def _shard(part: HostArray | None, backend: Any, dtype: str, stack: Stack) -> Any:
    """Pack a matrix that ranks divide by columns."""
    array = present(part)
    if array.dtype not in SIZES:
        return stack([array], backend)
    return Plain(backend.tensor(to_dtype(array, dtype)))
