"""Packed matrices of experts in device memory, in the order of codes of
:mod:`inl_torch.triton.quantized.packed`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from inl.checkpoints.blocks.codes import (
    FLOAT4_BLOCKS,
    FLOAT8_BLOCKS,
    SPLIT,
    split_blocks,
    split_float4,
    split_float8,
)
from inl.dtypes import HostArray, wrap
from inl.spec.op import Spec
from inl.weights.load import to_dtype
from inl.weights.packing import refuse_dtypes
from inl_torch.triton.quantized.packed import FLOAT8, UNIT_BYTES

BLOCKS: Final = (*SPLIT, FLOAT8_BLOCKS, FLOAT4_BLOCKS)
"""Stored dtypes that can be packed."""


class ExpertStack(NamedTuple):
    """A matrix [N, K] for each of E experts; dense where ``scales`` is ``None``."""

    codes: torch.Tensor
    """[E, N, K], or uint8 [E, N, K / 2]."""
    scales: torch.Tensor | None = None
    """[E, N, groups], floating. Or uint8, exponents of powers of two with a bias of
    127: the 4-bit codes are then floats (E2M1), not integers."""
    offsets: torch.Tensor | None = None
    """[E, N, groups], floating."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, rows, size = self.codes.shape
        return experts, rows, size * (8 // self.bits if self.scales is not None else 1)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of the kernels for the format."""
        assert self.scales is not None, "a dense matrix has no format"
        floats = self.scales.dtype == torch.uint8
        has_zero = self.bits == 4 and not floats and self.offsets is None
        return {
            "ROW_UNITS": self.codes.shape[2] // UNIT_BYTES,
            "GROUPS": self.scales.shape[2],
            "BITS": self.bits,
            "FLOAT": floats or self.codes.dtype == FLOAT8,
            "ZERO": 8.0 if has_zero else 0.0,
            "OFFSET": self.offsets is not None,
        }

    def tensors(self) -> tuple[Any, Any, Any]:
        """Return the codes as bytes, the scales, and the offsets or a placeholder."""
        codes = self.codes.view(torch.uint8)
        return codes, self.scales, self.scales if self.offsets is None else self.offsets


def refuse_stacks(**stored: Spec) -> str | None:
    """Return the reason why matrices of experts cannot be packed, or ``None``."""
    if "gate" in stored and stored["gate"].dtype != stored["up"].dtype:
        return f"gate is stored as {stored['gate'].dtype}, up as {stored['up'].dtype}"
    return refuse_dtypes(*BLOCKS)(**stored)


def pack_stack(array: HostArray, backend: Any, dtype: str) -> ExpertStack:
    """Pack stored matrices [E, N, K]; dense in ``dtype`` if they are not blocks.

    Blocks that a shard of their columns would split have been decoded.
    """
    if array.dtype not in BLOCKS:
        return ExpertStack(backend.tensor(to_dtype(array, dtype)))
    experts, rows, columns = array.shape
    lines = experts * rows
    flat = HostArray(array.data.reshape(lines, -1), array.dtype, (lines, columns))

    def place(part: Any, name: str = "") -> Any:
        if part is None:
            return None
        stacked = part.reshape(experts, rows, -1)
        stacked.flags.writeable = False  # so that it is not copied on the host
        named = HostArray(stacked, name, stacked.shape) if name else wrap(stacked)
        return backend.tensor(named)

    if array.dtype == FLOAT4_BLOCKS:
        return ExpertStack(*map(place, split_float4(flat)))
    if array.dtype == FLOAT8_BLOCKS:
        codes, scales = split_float8(flat)
        return ExpertStack(place(codes).view(FLOAT8), place(scales, "bfloat16"))
    return ExpertStack(*map(place, split_blocks(flat)))
