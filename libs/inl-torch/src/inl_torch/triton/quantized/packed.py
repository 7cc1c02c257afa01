"""Packed weights of 4 or 8 bits in device memory.

A matrix is stored as codes, row-major, and one scale (for some formats also an offset)
per group of a row: ``weight = scale * code + offset``. 4-bit codes are stored two per
byte, as in GGUF: of each 32 codes, the first 16 are the low halves of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from inl.checkpoints.blocks.codes import (
    FLOAT8_BLOCKS,
    SPLIT,
    split_blocks,
    split_float8,
)
from inl.dtypes import HostArray, wrap
from inl.ops.linear import Linear
from inl.spec.kernel import HostGroup
from inl.spec.op import Spec
from inl.spec.weights import in_layout
from inl.weights.load import to_dtype
from inl.weights.packing import present, refuse_dtypes
from inl_torch.eager.linear import StackedQkv, can_stack_qkv
from inl_torch.eager.mlp import StackedMlp

PACKED: Final = "packed"
"""Layout of the packed weights of all ops."""

UNIT_BYTES: Final = 16
"""Bytes of codes in a unit, which a thread loads at a time."""

FLOAT8: Final = torch.float8_e4m3fn

CODES: Final = (torch.uint8, torch.int8, FLOAT8)
"""Dtypes of codes: two 4-bit codes (minus 8 if there is no offset), int8, float8."""


class Packed(NamedTuple):
    """A matrix [N, K]; dense where ``scales`` is ``None``."""

    codes: torch.Tensor
    """[N, K], or uint8 [N, K / 2]."""
    scales: torch.Tensor | None = None
    """[N, groups], floating."""
    offsets: torch.Tensor | None = None
    """[N, groups], floating."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, bytes_ = self.codes.shape
        return rows, bytes_ * self.per_byte

    @property
    def per_byte(self) -> int:
        """Codes per element of ``codes``."""
        return 2 if self.codes.dtype == torch.uint8 else 1


PackedLinear = in_layout(PACKED)(Linear)
PackedQkv = in_layout(PACKED)(StackedQkv)
PackedMlp = in_layout(PACKED)(StackedMlp)


def packed(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None
) -> Packed:
    """Pack codes [N, K] with scales of groups of equal size.

    codes: int8; float8 e4m3; or uint8 below 16, which are packed to 4 bits and have a
    zero point of 8 if there are no offsets. scales, offsets: [N, groups].
    Raises :class:`ValueError` for dtypes and sizes that the kernels do not support.
    """
    if codes.dtype not in CODES:
        raise ValueError(f"codes: found {codes.dtype}, accepted: {CODES}")
    multiple = UNIT_BYTES if codes.dtype != torch.uint8 else 2 * UNIT_BYTES
    rows, columns = codes.shape
    groups = scales.shape[-1]
    group = columns // groups
    if columns % groups or columns % multiple or group % multiple:
        raise ValueError(
            f"codes: found {columns} columns in {groups} groups, accepted: groups of "
            f"a multiple of {multiple}"
        )
    for name, part in (("scales", scales), ("offsets", offsets)):
        if part is not None and part.shape != (rows, groups):
            raise ValueError(
                f"{name}: found {list(part.shape)}, accepted: {[rows, groups]}"
            )
    if codes.dtype == torch.uint8:
        halves = codes.view(rows, -1, 2, UNIT_BYTES)
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)
    return Packed(codes.contiguous(), scales, offsets)


can_pack = refuse_dtypes(*SPLIT, FLOAT8_BLOCKS)


def refuse_qkv(**stored: Spec) -> str | None:
    alike = {stored[name].dtype for name in "qkv"}
    if len(alike) > 1:
        return f"queries, keys and values of several kinds: {', '.join(sorted(alike))}"
    return can_pack(**stored) or can_stack_qkv(**stored)


def refuse_mlp(**stored: Spec) -> str | None:
    gate, up = stored["gate"].dtype, stored["up"].dtype
    if gate != up:
        return f"gate is stored as {gate}, up as {up}"
    return can_pack(**stored)


def pack_linear(group: HostGroup, backend: Any, dtype: str) -> Linear:
    matrix = _matrix([group["weight"]], backend, dtype)
    return PackedLinear(matrix, stack_biases([group.get("bias")], [0], backend, dtype))


def pack_qkv(group: HostGroup, backend: Any, dtype: str) -> StackedQkv:
    parts = [present(group[name]) for name in "qkv"]
    matrix = _matrix(parts, backend, dtype)
    rows = [part.shape[0] for part in parts]
    biases = [group.get(f"{name}_bias") for name in "qkv"]
    keys = matrix.codes[rows[0] : rows[0] + rows[1]]
    return PackedQkv(matrix, keys, stack_biases(biases, rows, backend, dtype))


def pack_mlp(group: HostGroup, backend: Any, dtype: str) -> StackedMlp:
    gate_up = _matrix([group["gate"], group["up"]], backend, dtype)
    return PackedMlp(gate_up, _matrix([group["down"]], backend, dtype))


def _matrix(parts: Sequence[HostArray | None], backend: Any, dtype: str) -> Packed:
    """Stack matrices by rows; dense where one of them is already dequantized."""
    arrays = [present(part) for part in parts]
    if all(part.dtype == FLOAT8_BLOCKS for part in arrays):
        codes, scales = zip(*map(split_float8, arrays), strict=True)
        exponents = np.concatenate(scales)
        return Packed(
            backend.tensor(wrap(np.concatenate(codes))).view(FLOAT8),
            backend.tensor(HostArray(exponents, "bfloat16", exponents.shape)),
        )
    if any(part.dtype not in SPLIT for part in arrays):
        dense = [to_dtype(part, dtype).data for part in arrays]
        data = np.concatenate(dense)
        return Packed(backend.tensor(HostArray(data, dtype, data.shape)))
    fields = zip(*(split_blocks(part) for part in arrays), strict=True)
    return Packed(*(_concatenate(field, backend) for field in fields))


def _concatenate(parts: Sequence[Any], backend: Any) -> Any:
    if any(part is None for part in parts):
        return None
    return backend.tensor(wrap(np.concatenate(parts)))


def stack_biases(
    parts: Sequence[HostArray | None], rows: Sequence[int], backend: Any, dtype: str
) -> Any:
    """Concatenate biases; 0 for missing ones; ``None`` if all are missing."""
    if all(part is None for part in parts):
        return None
    arrays = [
        part or wrap(np.zeros(size, np.float32))
        for part, size in zip(parts, rows, strict=True)
    ]
    data = np.concatenate([to_dtype(part, dtype).data.reshape(-1) for part in arrays])
    return backend.tensor(HostArray(data, dtype, data.shape))
