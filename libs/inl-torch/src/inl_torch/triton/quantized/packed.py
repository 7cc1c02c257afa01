"""Weights of 4 or 8 bits that stay packed in the device's memory.

A matrix is its codes, row after row, and a scale (with an offset, for some kinds) for
each group of a row: ``weight = scale * code + offset``. Codes of 4 bits lie two in a
byte, as in GGUF: of each 32, the first 16 are the low halves of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from inl.dtypes import HostArray, wrap
from inl.spec.op import Spec
from inl.weights.loader import to_dtype
from inl.weights.quant import QUANTIZATIONS
from inl_torch.eager.linear import present, can_stack_qkv

PACKED: Final = "packed"
"""Layout of the three tuples of weights below."""

HALF: Final = 16
"""Bytes of codes that a thread takes at once."""

KINDS: Final = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
"""Packings that codes and scales are taken out of without a loss."""

FLOAT8: Final = torch.float8_e4m3fn

CODES: Final = (torch.uint8, torch.int8, FLOAT8)
"""Two codes of 4 bits, less 8 where there is no offset; a code; a float of 8 bits."""


class Packed(NamedTuple):
    """A matrix [N, K]; a plain one where it has no scales."""

    codes: torch.Tensor
    """[N, K], or uint8 [N, K / 2]."""
    scales: torch.Tensor | None = None
    """[N, groups], floating."""
    offsets: torch.Tensor | None = None
    """As ``scales``."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, bytes_ = self.codes.shape
        return rows, bytes_ * self.per_byte

    @property
    def per_byte(self) -> int:
        """Codes that lie in a byte, or in a plain number."""
        return 2 if self.codes.dtype == torch.uint8 else 1


class PackedLinear(NamedTuple):
    """A matrix and perhaps its bias [N]."""

    matrix: Packed
    bias: torch.Tensor | None = None

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return PACKED


class PackedQkv(NamedTuple):
    """Queries, keys and values as the rows of one matrix."""

    matrix: Packed
    keys: torch.Tensor
    """The rows of the codes that make keys, for their number."""
    bias: torch.Tensor | None = None

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return PACKED


class PackedMlp(NamedTuple):
    """Gate and up as the rows of one matrix; and down."""

    gate_up: Packed
    down: Packed

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return PACKED


def packed(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None
) -> Packed:
    """A matrix of codes [N, K] and what scales their groups, each of equal size.

    codes: int8; float8 e4m3; or uint8 below 16, which become 4 bits each and without
    offsets count from 8. scales, offsets: [N, groups], or [N, 1] for a scale a row.
    Raises :class:`ValueError` for sizes that the kernels do not take.
    """
    if codes.dtype not in CODES:
        raise ValueError(f"codes: found {codes.dtype}, accepted: {CODES}")
    step = HALF if codes.dtype != torch.uint8 else 2 * HALF
    rows, columns = codes.shape
    groups = scales.shape[-1]
    group = columns // groups
    if columns % groups or columns % step or group % step:
        raise ValueError(
            f"codes: found {columns} columns in {groups} groups, accepted: groups of "
            f"a multiple of {step}"
        )
    for name, part in (("scales", scales), ("offsets", offsets)):
        if part is not None and part.shape != (rows, groups):
            raise ValueError(
                f"{name}: found {list(part.shape)}, accepted: {[rows, groups]}"
            )
    if codes.dtype == torch.uint8:
        halves = codes.view(rows, -1, 2, HALF)
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)
    return Packed(codes.contiguous(), scales, offsets)


def refuse_parts(**stored: Spec) -> str | None:
    """``None``, or why a group's matrices do not stay packed."""
    matrices = {n: s for n, s in stored.items() if not n.endswith("bias")}
    for name, spec in matrices.items():
        if spec.dtype not in KINDS:
            return f"{name} is stored as {spec.dtype}, not as {', '.join(KINDS)}"
    return None


def refuse_qkv(**stored: Spec) -> str | None:
    alike = {stored[name].dtype for name in "qkv"}
    if len(alike) > 1:
        return f"queries, keys and values of several kinds: {', '.join(sorted(alike))}"
    return refuse_parts(**stored) or can_stack_qkv(**stored)


def refuse_mlp(**stored: Spec) -> str | None:
    gate, up = stored["gate"].dtype, stored["up"].dtype
    if gate != up:
        return f"gate is stored as {gate}, up as {up}"
    return refuse_parts(**stored)


Group = Mapping[str, HostArray | None]


def pack_linear(group: Group, backend: Any, dtype: str) -> PackedLinear:
    matrix = _matrix([group["weight"]], backend, dtype)
    return PackedLinear(matrix, _vector([group.get("bias")], [0], backend, dtype))


def pack_qkv(group: Group, backend: Any, dtype: str) -> PackedQkv:
    parts = [present(group[name]) for name in "qkv"]
    matrix = _matrix(parts, backend, dtype)
    rows = [part.shape[0] for part in parts]
    biases = [group.get(f"{name}_bias") for name in "qkv"]
    keys = matrix.codes[rows[0] : rows[0] + rows[1]]
    return PackedQkv(matrix, keys, _vector(biases, rows, backend, dtype))


def pack_mlp(group: Group, backend: Any, dtype: str) -> PackedMlp:
    gate_up = _matrix([group["gate"], group["up"]], backend, dtype)
    return PackedMlp(gate_up, _matrix([group["down"]], backend, dtype))


def _matrix(parts: Sequence[HostArray | None], backend: Any, dtype: str) -> Packed:
    """Matrices below each other; plain where one of them was decoded on its way."""
    given = [present(part) for part in parts]
    if any(part.dtype not in KINDS for part in given):
        plain = [to_dtype(part, dtype).data for part in given]
        data = np.concatenate(plain)
        return Packed(backend.tensor(HostArray(data, dtype, data.shape)))
    fields = zip(*(unpacked(part) for part in given), strict=True)
    return Packed(*(_stacked(field, backend) for field in fields))


def _stacked(parts: Sequence[Any], backend: Any) -> Any:
    if any(part is None for part in parts):
        return None
    return backend.tensor(wrap(np.concatenate(parts)))


def _vector(
    parts: Sequence[HostArray | None], rows: Sequence[int], backend: Any, dtype: str
) -> Any:
    """Biases one after the other, zeros for those that are absent among others."""
    if all(part is None for part in parts):
        return None
    given = [
        part or wrap(np.zeros(size, np.float32))
        for part, size in zip(parts, rows, strict=True)
    ]
    data = np.concatenate([to_dtype(part, dtype).data.reshape(-1) for part in given])
    return backend.tensor(HostArray(data, dtype, data.shape))


def unpacked(array: HostArray) -> tuple[Any, Any, Any]:
    """Codes, scales and offsets of a stored matrix [N, K] of one of :data:`KINDS`."""
    kind = QUANTIZATIONS[array.dtype]
    rows, columns = array.shape
    blocks = array.data.reshape(rows, columns // kind.block, kind.bytes)
    held = 1 if kind.symmetric else 2
    heads = np.ascontiguousarray(blocks[:, :, : 2 * held]).view(np.float16)
    scales = np.ascontiguousarray(heads[:, :, 0])
    offsets = None if kind.symmetric else np.ascontiguousarray(heads[:, :, 1])
    body = np.ascontiguousarray(blocks[:, :, 2 * held :])
    if kind.bits == 8:
        return body.view(np.int8).reshape(rows, columns), scales, offsets
    if kind.bits == 4:
        return body.reshape(rows, columns // 2), scales, offsets
    fifth = np.unpackbits(body[:, :, :4], axis=-1, bitorder="little")
    low = np.concatenate([body[:, :, 4:] & 15, body[:, :, 4:] >> 4], -1)
    codes = (low | fifth << 4).astype(np.int8) - np.int8(kind.zero)
    return codes.reshape(rows, columns), scales, offsets
