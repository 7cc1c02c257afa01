"""Weights of 4 bits in device memory, with the scales and offsets of their file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from inl.checkpoints.blocks.codes import split_blocks
from inl.dtypes import HostArray, wrap
from inl.spec.op import Spec
from inl_torch.triton.float8.weights import Float8
from inl_torch.triton.matmul.stored import ROWS, joined, matrices, refuse_width

INT4_CHUNKS: Final = "int4_chunks"
"""Layout of weights of 4 bits."""

GROUP: Final = 32
"""Codes of 4 bits that share a scale in blocks of a file."""

WIDE: Final = 128
"""Likewise where the scales of four blocks are equal, as in files of AWQ and GPTQ."""


class Int4(NamedTuple):
    """A matrix [N, K] of 4 bits: ``weight = scale * code + offset``, code 0 to 15."""

    codes: torch.Tensor
    """uint8 [N, K / 2]: a chunk has the codes of one group in the low halves of its
    bytes, of the next one in the high halves."""
    scales: torch.Tensor
    """float16 [N, groups]."""
    offsets: torch.Tensor
    """float16 [N, groups]."""
    copy: Float8 | None = None
    """The same matrix rounded to E4M3, for many rows of activations; ``None``: it is
    decoded for them."""

    @property
    def width(self) -> int:
        """Codes of a group, and bytes of a chunk."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_wide(self) -> bool:
        """Whether groups are wide."""
        return self.width == WIDE

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


def refuse_int4(**stored: Spec) -> str | None:
    """Return the reason why matrices cannot be packed in 4 bits, or ``None``."""
    for name, spec in matrices(stored).items():
        if spec.dtype not in ("q4_0", "q4_1"):
            return f"{name} is stored as {spec.dtype}, not as q4_0 or q4_1"
        if spec.shape[1] % (2 * GROUP):
            return f"{name} has {spec.shape[1]} columns, takes multiples of {2 * GROUP}"
    return refuse_width(stored)


def stacked_int4(arrays: Sequence[HostArray], backend: Any) -> Int4:
    """Pack matrices as one, by rows."""
    fields = [split_blocks(array) for array in arrays]
    width = WIDE if all(is_wide(*each[1:]) for each in fields) else GROUP
    codes, heads, offsets = joined(_int4(*each, width, backend) for each in fields)
    return Int4(codes, heads, offsets)


def is_wide(scales: NDArray[Any], offsets: NDArray[Any] | None) -> bool:
    """Whether scales and offsets [N, K / 32] are those of wider groups."""
    columns = scales.shape[1] * GROUP
    if columns % (2 * WIDE):
        return False
    given = [each for each in (scales, offsets) if each is not None]
    fours = [
        each.view(np.uint16).reshape(len(each), -1, WIDE // GROUP) for each in given
    ]
    return all(bool((each == each[:, :, :1]).all()) for each in fours)


def _int4(
    codes: Any, scales: Any, offsets: Any, width: int, backend: Any
) -> tuple[torch.Tensor, ...]:
    """Return codes in chunks, scales and offsets of a matrix of a file."""
    if offsets is None:  # the code of zero is 8
        offsets = scales * np.float16(-8)
    given = backend.tensor(wrap(codes))
    for start in range(0, len(given), ROWS):
        part = given[start : start + ROWS]
        blocks = part.view(len(part), -1, 16)
        plain = torch.cat([blocks & 15, blocks >> 4], -1).view(len(part), -1, 2, width)
        part.copy_((plain[:, :, 0] | plain[:, :, 1] << 4).view(part.shape))
    step = width // GROUP
    heads = (np.ascontiguousarray(each[:, ::step]) for each in (scales, offsets))
    return given, *(backend.tensor(wrap(each)) for each in heads)
