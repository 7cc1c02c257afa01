"""Packed weights in the memory of a TPU.

A matrix [N, K] of a checkpoint is stored transposed: outputs run along the lanes of a
register, so that a scale of 32 inputs is broadcast across the sublanes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inl.checkpoints.blocks.codes import SPLIT, split_blocks, unpack_nibbles
from inl.dtypes import HostArray, wrap
from inl.weights.load import to_dtype
from inl_jax.tensors import Array

PACKED: Final = "packed"
"""Layout of the packed weights of all ops."""

GROUP: Final = 32
"""Inputs that share a scale."""

LANES: Final = 128

WHOLE: Final = 4096
"""Most inputs of a block."""

PART: Final = 1024
"""The inputs of a longer matrix are padded to a multiple of this."""

FLOAT8: Final = "float8_e4m3"

KINDS: Final = (*SPLIT, FLOAT8)
"""Formats that are packed."""


CODE8: Final = jnp.float8_e4m3b11fnuz
"""Stored in place of float8 e4m3: the same bits are a value 16 times smaller, which
TPUs before TPU7x convert in one instruction, while they emulate float8 e4m3."""

CODE8_SCALE: Final = 16.0


CODES4: Final = jnp.uint8
"""Dtype of pairs of 4-bit codes: the inputs 2 i in the low halves, 2 i + 1 in the high
ones, which is how int4 fills a register. Arrays of int4 are no arguments of programs
compiled ahead of time: JAX 0.10 finds their layout wrong on CPUs."""


class Packed(NamedTuple):
    """A matrix: ``value = scale * code + offset``."""

    codes: Array
    """[K', N] int8, :data:`CODE8` or the compute dtype, [K' / 2, N] :data:`CODES4`; K'
    is K padded with zeros."""
    scales: Array | None = None
    """[K' / 32, N] int16: the bits of float16."""
    offsets: Array | None = None
    """[K' / 32, N] int16: the bits of float16. Codes of 4 bits are stored minus 8."""

    @property
    def per_row(self) -> int:
        """Inputs per row of the codes."""
        return 2 if self.codes.dtype == CODES4 else 1


def is_nan8(data: Any) -> Any:
    """Return where bytes of float8 e4m3 are NaN."""
    return (data & 0x7F) == 0x7F


def padded_inputs(inputs: int) -> int:
    """Return the inputs K' of a stored matrix with K inputs."""
    unit = LANES if inputs <= WHOLE else PART
    return inputs + -inputs % unit


def pack_matrix(array: HostArray, backend: Any, dtype: str) -> Packed:
    """Pack a stored matrix [N, K]; one that is not of :data:`KINDS` is converted."""
    inputs = array.shape[1]

    def upload(part: Any, rows: int) -> Any:
        flat = np.ascontiguousarray(part.reshape(array.shape[0], -1).T)
        flat = np.pad(flat, ((0, rows - len(flat)), (0, 0)))
        return backend.tensor(wrap(flat))

    size = padded_inputs(inputs)
    if array.dtype == FLOAT8:
        data = array.data.view(np.uint8)
        if not is_nan8(data).any():
            # A zero with a sign would be the only NaN of the other format.
            codes = upload(np.where(data == 0x80, np.uint8(0), data), size)
            return Packed(jax.lax.bitcast_convert_type(codes, CODE8))
    if array.dtype not in SPLIT:
        plain = backend.tensor(to_dtype(array, dtype)).T
        return Packed(jnp.pad(plain, ((0, size - inputs), (0, 0))))
    codes, *scales = split_blocks(array)
    if codes.dtype == np.uint8:
        # Two's complement of a code minus 8.
        four = unpack_nibbles(codes).reshape(array.shape[0], -1) ^ np.uint8(8)
        stored = upload(four[:, ::2] | four[:, 1::2] << 4, size // 2)
    else:
        stored = upload(codes, size)
    bits = (
        None
        if scale is None
        else jax.lax.bitcast_convert_type(upload(scale, size // GROUP), jnp.int16)
        for scale in scales
    )
    return Packed(stored, *bits)
