"""Products of one row of activations with packed weights."""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import torch

from inl.ops.norm import Norm
from inl_cuda.one_row.compiler import POINTER, aligned, function_of
from inl_torch.triton.common import dense, dtype_name
from inl_torch.triton.float8.weights import Float8
from inl_torch.triton.int4.weights import WIDE, Int4
from inl_torch.triton.matmul.stored import Matrix

WIDEST: Final = 1 << 15
"""Most columns: a program has the whole row in shared memory."""

MOST_BYTES: Final = (1 << 32) - 1
"""Largest matrix: offsets have 32 bits."""

SHARED: Final = 228 << 10
"""Shared memory of a multiprocessor, in bytes."""

RESERVED: Final = 2 << 10
"""Bytes of it that each program has besides: the driver's, and sums of its warps."""

TILE: Final = 16
"""Rows of the matrix that a warp multiplies at a time."""

TYPES: Final = (*[POINTER] * 9, ctypes.c_int, ctypes.c_float)
ACTIVATIONS: Final = {"": 0, "silu": 1, "gelu_tanh": 2}
DTYPES: Final = ("bfloat16", "float16")


class Launch(NamedTuple):
    """Launch parameters; measured on an H200."""

    threads: int
    per_processor: int
    """Programs of a multiprocessor."""
    resident: int
    """Programs of a multiprocessor, those of the next kernel included."""
    depth: int
    """Units of a warp in flight, at most."""
    early: int
    """Those that are copied before the previous kernel ends: the row waits behind
    them."""


class Sizes(NamedTuple):
    """Sizes of a launch."""

    programs: int
    depth: int
    """Units of a warp in flight; 0 if shared memory has no room for one."""
    shared: int
    """Bytes of shared memory of a program."""


FLOAT8_LAUNCH: Final = Launch(512, 1, 1, 4, 2)
INT4_LAUNCH: Final = Launch(512, 1, 1, 2, 2)


class OneRowProducts:
    """Products of one row of activations with stored matrices.

    processors: multiprocessors of the chip. shape: launch parameters of all matrices,
    instead of those of their format.
    """

    def __init__(self, processors: int, shape: Launch | None = None) -> None:
        self.processors, self.shape = processors, shape

    def takes(self, x: torch.Tensor, w: Matrix) -> bool:
        """Whether rows [T, K] multiply a matrix [N, K] here."""
        return is_stored(w) and self.fits(x, *w.shape, is_int4=is_int4(w))

    def fits(self, x: Any, rows: int, k: int, *, is_int4: bool) -> bool:
        """Whether rows like ``x`` multiply a matrix of this size."""
        if x.shape[0] != 1 or dtype_name(x) not in DTYPES or k > WIDEST:
            return False
        if rows * k // (2 if is_int4 else 1) > MOST_BYTES:
            return False
        shape = self._shape(is_int4=is_int4)
        sizes = (rows, max(rows // 2, 1))  # the latter if gated
        return all(self._sizes(n, rows, k, shape, is_int4=is_int4).depth for n in sizes)

    def multiply(
        self,
        x: torch.Tensor,
        w: Matrix,
        bias: torch.Tensor | None,
        *,
        gated: str = "",
        pdl: bool,
    ) -> torch.Tensor:
        """Return ``x`` [1, K] @ ``w`` [N, K].T + ``bias`` [N]: [1, N].

        gated: activation of the first half of the matrix's rows, by which the second
        half is multiplied; the result is then [1, N / 2]. pdl: whether the kernel may
        start before the previous one ends, which must not write the weights.
        """
        return self._launch(dense(x), None, w, bias, gated, pdl=pdl)[1]

    def norm_multiply(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Matrix, bias: torch.Tensor | None, *, gated: str = "", pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [1, K], and the product of its norm."""
        added = dense(delta), norm.weight, eps
        return self._launch(dense(residual), added, w, bias, gated, pdl=pdl)

    def _launch(
        self, x: torch.Tensor, added: tuple[torch.Tensor, torch.Tensor, float] | None,
        w: Any, bias: torch.Tensor | None, gated: str, *, pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        (rows, k), place, int4 = w.shape, x.device, is_int4(w)
        n = rows // (2 if gated else 1)
        y = torch.empty((1, n), dtype=x.dtype, device=place)
        delta, gain, eps = added or (x, x, 0.0)
        summed = torch.empty_like(x) if added else x
        shape = self._shape(is_int4=int4)
        programs, depth, shared = self._sizes(n, rows, k, shape, is_int4=int4)
        options = {
            "K": k, "INT4": int(int4), "BFLOAT16": int(x.dtype == torch.bfloat16),
            "NORMED": int(added is not None), "GATED": ACTIVATIONS[gated],
            "HAS_BIAS": int(bias is not None), "THREADS": shape.threads,
            "RESIDENT": shape.resident, "DEPTH": depth,
            "EARLY": min(shape.early, depth), "PDL": int(pdl),
        }  # fmt: skip
        function = function_of(
            "product.cu", "one_row", TYPES, tuple(options.items()), place
        )
        function.allow_shared(shared)
        pointers = (
            aligned(x), aligned(delta), aligned(gain), summed, w.codes, w.scales,
            w.offsets if int4 else w.scales, x if bias is None else bias, y,
        )  # fmt: skip
        function.launch(
            programs, shape.threads, shared,
            (*(each.data_ptr() for each in pointers), n, eps), pdl=pdl,
        )  # fmt: skip
        return summed, y

    def _shape(self, *, is_int4: bool) -> Launch:
        return self.shape or (INT4_LAUNCH if is_int4 else FLOAT8_LAUNCH)

    def _sizes(
        self, n: int, rows: int, k: int, shape: Launch, *, is_int4: bool
    ) -> Sizes:
        """Return how ``n`` results of a matrix [rows, k] are computed."""
        programs = min(shape.per_processor * self.processors, -(-n // 8))
        most = -(-n // programs)  # rows of a program
        tiles = -(-most // TILE) * (rows // n)
        slot = shape.threads * (68 if is_int4 else 64)
        fixed = row_bytes(k, is_int4=is_int4)
        fixed += shape.threads // 32 * tiles * TILE * 4
        budget = SHARED // shape.resident - RESERVED
        depth = min(max(budget - fixed, 0) // slot, shape.depth)
        return Sizes(programs, depth, fixed + depth * slot)


def is_stored(w: Any) -> bool:
    """Whether a matrix is stored in a way that the kernel multiplies."""
    return isinstance(w, Float8) or (isinstance(w, Int4) and w.is_wide)


def is_int4(w: Any) -> bool:
    """Whether a matrix has 4 bits, not 8."""
    return isinstance(w, Int4)


def row_bytes(k: int, *, is_int4: bool) -> int:
    """Shared memory of a row of ``k`` columns, and of the sums of its groups."""
    if is_int4:
        return 2 * k + k // WIDE * 4
    return 2 * (-(-k // 128) * 128)
