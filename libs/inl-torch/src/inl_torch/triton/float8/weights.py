"""Weights in E4M3 that rows in float8 multiply, in device memory.

Each row of a matrix has a scale, as in files. Blocks of ``mxfp8`` have powers of two:
their codes are shifted to the largest one of a row, which is exact but for elements
below 2**-6 times that one, which become multiples of 2**-9 times it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from inl.checkpoints.blocks.codes import (
    FLOAT8_BLOCKS,
    FLOAT8_SCALED,
    split_float8,
    split_scaled_float8,
)
from inl.dtypes import HostArray, wrap
from inl.spec.op import Spec
from inl_torch.triton.matmul.stored import ROWS, joined, matrices, refuse_width

FLOAT8_ROWS: Final = "float8_rows"
"""Layout of weights in E4M3."""

FLOAT8: Final = torch.float8_e4m3fn

KINDS: Final = (FLOAT8_BLOCKS, FLOAT8_SCALED)
"""Dtypes of blocks in E4M3."""

MULTIPLE: Final = 16
"""What the device's library divides rows and columns of a matrix in E4M3 by."""


class Float8(NamedTuple):
    """A matrix [N, K] in E4M3: ``weight = scale * code``."""

    codes: torch.Tensor
    """[N, K]."""
    scales: torch.Tensor
    """[N], float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1]


def refuse_float8(**stored: Spec) -> str | None:
    """Return the reason why matrices cannot be packed in E4M3, or ``None``."""
    for name, spec in matrices(stored).items():
        if spec.dtype not in KINDS:
            return f"{name} is stored as {spec.dtype}, not as {' or '.join(KINDS)}"
        rows, columns = spec.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            return f"{name} is {rows} x {columns}, takes multiples of {MULTIPLE}"
    return refuse_width(stored)


def stacked_float8(arrays: Sequence[HostArray], backend: Any) -> Float8:
    """Pack matrices as one, by rows."""
    return Float8(*joined(_float8(array, backend) for array in arrays))


def _float8(array: HostArray, backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [N, K] and scales [N] of a matrix in blocks."""
    if array.dtype == FLOAT8_SCALED:
        codes, scales = split_scaled_float8(array)
        # The scales of a row are equal: see inl.checkpoints.quantized.scaled.
        first = np.ascontiguousarray(scales[:, 0])
        return backend.tensor(wrap(codes)).view(FLOAT8), backend.tensor(wrap(first))
    codes, bits = split_float8(array)
    given = backend.tensor(wrap(codes)).view(FLOAT8)
    powers = backend.tensor(HostArray(bits, "bfloat16", bits.shape)).float()
    rows = powers.amax(1)
    return shifted(given, powers, rows), rows


def shifted(
    codes: torch.Tensor, powers: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return codes [N, K] of scales ``rows`` [N] for those of ``powers`` [N, groups].

    All scales are powers of two, those of rows at least as large.
    """
    count, groups = powers.shape
    out = torch.empty_like(codes)
    for start in range(0, count, ROWS):
        part = slice(start, start + ROWS)
        wide = codes[part].float().view(-1, groups, codes.shape[1] // groups)
        wide *= (powers[part] / rows[part, None])[:, :, None]
        out[part] = wide.view(out[part].shape).to(FLOAT8)
    return out
