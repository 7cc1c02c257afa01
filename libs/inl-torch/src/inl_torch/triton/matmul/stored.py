"""Weights that products stream as they are stored: containers, and their packing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from inl.dtypes import SIZES, HostArray
from inl.spec.op import Spec
from inl.spec.strict_array import StrictArray
from inl.weights.loader import to_dtype
from inl_torch.eager.linear import can_stack_qkv, present
from inl_torch.triton.quantized.packed import stack_biases

WIDEST: Final = 1 << 16
"""Most columns of a matrix: one program reads a row of activations."""

ROWS: Final = 1024
"""Rows that are converted at once, which bounds the temporary memory."""


class Matrix(Protocol):
    """A matrix [N, K]."""

    @property
    def layout(self) -> str:
        """Name of the layout."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""


class Plain(NamedTuple):
    """A matrix [N, K] in the compute dtype: blocks of its file end within a shard."""

    weight: torch.Tensor
    layout: str
    """Name of the layout of which the other ranks, or shards, are."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.weight.shape[0], self.weight.shape[1]


class StreamedLinear(NamedTuple):
    """A matrix and an optional bias [N]."""

    matrix: Matrix
    bias: torch.Tensor | None = None

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return self.matrix.layout


class StreamedQkv(NamedTuple):
    """Query, key and value projections stacked to one matrix."""

    matrix: Matrix
    keys: torch.Tensor
    """View of the key rows of the codes; its shape gives their number."""
    bias: torch.Tensor | None = None

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return self.matrix.layout


class StreamedMlp(NamedTuple):
    """Gate and up projections stacked to one matrix, and the down projection."""

    gate_up: Matrix
    down: Matrix

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return self.gate_up.layout


Refuse = Callable[..., str | None]
Group = Mapping[str, HostArray | None]
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

    return {
        "linear": (partial(pack_linear, layout=layout, stack=stack), refuse),
        "qkv_linear": (partial(pack_qkv, stack=stack), refuse_qkv),
        "gated_mlp": (partial(pack_mlp, layout=layout, stack=stack), refuse),
    }


def pack_linear(
    group: Group, backend: Any, dtype: str, *, layout: str, stack: Stack
) -> StreamedLinear:
    matrix = _shard(group["weight"], backend, dtype, layout, stack)
    return StreamedLinear(
        matrix, stack_biases([group.get("bias")], [0], backend, dtype)
    )


def pack_qkv(group: Group, backend: Any, dtype: str, *, stack: Stack) -> StreamedQkv:
    parts = [present(group[name]) for name in "qkv"]
    matrix = stack(parts, backend)
    rows = [part.shape[0] for part in parts]
    biases = [group.get(f"{name}_bias") for name in "qkv"]
    keys = matrix.codes[rows[0] : rows[0] + rows[1]]
    return StreamedQkv(matrix, keys, stack_biases(biases, rows, backend, dtype))


def pack_mlp(
    group: Group, backend: Any, dtype: str, *, layout: str, stack: Stack
) -> StreamedMlp:
    gate_up = stack([present(group["gate"]), present(group["up"])], backend)
    return StreamedMlp(gate_up, _shard(group["down"], backend, dtype, layout, stack))


def _shard(
    part: HostArray | None, backend: Any, dtype: str, layout: str, stack: Stack
) -> Any:
    """Pack a matrix that ranks divide by columns."""
    array = present(part)
    if array.dtype not in SIZES:
        return stack([array], backend)
    return Plain(backend.tensor(to_dtype(array, dtype)), layout)
