"""Weights that rows in float8 multiply, in device memory: E4M3, or codes of 4 bits.

A matrix in E4M3 has a scale for each row, as in files. Blocks of ``mxfp8`` have powers
of two: their codes are shifted to the largest one of a row, which is exact but for
elements below 2**-15 of the row's largest, at least. Codes of 4 bits keep their scales
and offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from inl.dtypes import SIZES, HostArray, wrap
from inl.spec.op import Spec
from inl.weights.loader import to_dtype
from inl.weights.quant_codes import (
    FLOAT8_BLOCKS,
    FLOAT8_SCALED,
    split_blocks,
    split_float8,
    split_scaled_float8,
)
from inl_torch.eager.linear import can_stack_qkv, present
from inl_torch.triton.quantized.packed import stack_biases

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT8_ROWS: Final = "float8_rows"
"""Layout of weights in E4M3."""

INT4_CHUNKS: Final = "int4_chunks"
"""Layout of weights of 4 bits."""

FLOAT8: Final = torch.float8_e4m3fn

KINDS: Final = (FLOAT8_BLOCKS, FLOAT8_SCALED)
"""Dtypes of blocks in E4M3."""

GROUP: Final = 32
"""Codes of 4 bits that share a scale in blocks of a file."""

WIDE: Final = 128
"""Likewise where the scales of four blocks are equal, as in files of AWQ and GPTQ."""

MULTIPLE: Final = 16
"""What the device's library divides rows and columns of a matrix in E4M3 by."""

WIDEST: Final = 1 << 16
"""Most columns of a matrix: one program rounds a row."""

ROWS: Final = 1024
"""Rows that are converted at once, which bounds the temporary memory."""


class Float8(NamedTuple):
    """A matrix [N, K] in E4M3: ``weight = scale * code``."""

    codes: torch.Tensor
    """[N, K]."""
    scales: torch.Tensor
    """[N], float32."""

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return FLOAT8_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1]


class Int4(NamedTuple):
    """A matrix [N, K] of 4 bits: ``weight = scale * code + offset``, code 0 to 15."""

    codes: torch.Tensor
    """uint8 [N, K / 2]: a chunk has the codes of one group in the low halves of its
    bytes, of the next one in the high halves."""
    scales: torch.Tensor
    """float16 [N, groups]."""
    offsets: torch.Tensor
    """float16 [N, groups]."""

    @property
    def width(self) -> int:
        """Codes of a group, and bytes of a chunk."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return INT4_CHUNKS

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


class Plain(NamedTuple):
    """A matrix [N, K] in the compute dtype: blocks of its file end within a shard."""

    weight: torch.Tensor
    layout: str
    """Name of the layout of which the other ranks, or shards, are."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.weight.shape[0], self.weight.shape[1]


Matrix = Float8 | Int4 | Plain


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


def refuse_float8(**stored: Spec) -> str | None:
    """Return the reason why matrices cannot be packed in E4M3, or ``None``."""
    for name, spec in _matrices(stored).items():
        if spec.dtype not in KINDS:
            return f"{name} is stored as {spec.dtype}, not as {' or '.join(KINDS)}"
        rows, columns = spec.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            return f"{name} is {rows} x {columns}, takes multiples of {MULTIPLE}"
    return _refuse_width(stored)


def refuse_int4(**stored: Spec) -> str | None:
    """Return the reason why matrices cannot be packed in 4 bits, or ``None``."""
    for name, spec in _matrices(stored).items():
        if spec.dtype not in ("q4_0", "q4_1"):
            return f"{name} is stored as {spec.dtype}, not as q4_0 or q4_1"
        if spec.shape[1] % (2 * GROUP):
            return f"{name} has {spec.shape[1]} columns, takes multiples of {2 * GROUP}"
    return _refuse_width(stored)


def _refuse_width(stored: Mapping[str, Spec]) -> str | None:
    for name, spec in _matrices(stored).items():
        if spec.shape[1] > WIDEST:
            return f"{name} has {spec.shape[1]} columns, takes {WIDEST} at most"
    return None


def _matrices(stored: Mapping[str, Spec]) -> dict[str, Spec]:
    return {name: one for name, one in stored.items() if not name.endswith("bias")}


Refuse = Callable[..., str | None]
Group = Mapping[str, HostArray | None]


def packers(
    layout: str, refuse: Refuse
) -> dict[str, tuple[Callable[..., Any], Refuse]]:
    """Return, by op, functions that pack its weights and why they cannot be."""

    def refuse_qkv(**stored: Spec) -> str | None:
        return refuse(**stored) or can_stack_qkv(**stored)

    return {
        "linear": (partial(pack_linear, layout=layout), refuse),
        "qkv_linear": (pack_qkv, refuse_qkv),
        "gated_mlp": (partial(pack_mlp, layout=layout), refuse),
    }


def pack_linear(
    group: Group, backend: Any, dtype: str, *, layout: str = ""
) -> StreamedLinear:
    matrix = _shard(group["weight"], backend, dtype, layout)
    return StreamedLinear(
        matrix, stack_biases([group.get("bias")], [0], backend, dtype)
    )


def pack_qkv(group: Group, backend: Any, dtype: str) -> StreamedQkv:
    parts = [present(group[name]) for name in "qkv"]
    matrix = _stacked(parts, backend)
    rows = [part.shape[0] for part in parts]
    biases = [group.get(f"{name}_bias") for name in "qkv"]
    keys = matrix.codes[rows[0] : rows[0] + rows[1]]
    return StreamedQkv(matrix, keys, stack_biases(biases, rows, backend, dtype))


def pack_mlp(
    group: Group, backend: Any, dtype: str, *, layout: str = ""
) -> StreamedMlp:
    gate_up = _stacked([group["gate"], group["up"]], backend)
    return StreamedMlp(gate_up, _shard(group["down"], backend, dtype, layout))


def _shard(part: HostArray | None, backend: Any, dtype: str, layout: str) -> Matrix:
    """Pack a matrix that ranks divide by columns."""
    array = present(part)
    if array.dtype not in SIZES:
        return _stacked([array], backend)
    return Plain(backend.tensor(to_dtype(array, dtype)), layout)


def _stacked(parts: Sequence[HostArray | None], backend: Any) -> Float8 | Int4:
    """Stack matrices by rows."""
    arrays = [present(part) for part in parts]
    if arrays[0].dtype in KINDS:
        return Float8(*_joined(_float8(array, backend) for array in arrays))
    fields = [split_blocks(array) for array in arrays]
    width = WIDE if all(is_wide(*each[1:]) for each in fields) else GROUP
    return Int4(*_joined(_int4(*each, width, backend) for each in fields))


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


def _joined(parts: Any) -> list[torch.Tensor]:
    return [torch.cat(field) for field in zip(*parts, strict=True)]


def _float8(array: HostArray, backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [N, K] and scales [N] of a matrix in blocks."""
    if array.dtype == FLOAT8_SCALED:
        codes, scales = split_scaled_float8(array)
        # The scales of a row are equal: see inl.weights.quant_scaled.
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
