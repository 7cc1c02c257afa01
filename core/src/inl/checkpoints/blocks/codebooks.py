"""Decoders of the ``gguf`` package, for dtypes with large published codebooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.errors import MissingPackage
from inl.install_command import install_command

if TYPE_CHECKING:
    from numpy.typing import NDArray

FALLBACK_DTYPES: Final = (
    "iq1_s",
    "iq1_m",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
)


def fallback_decoder(
    dtype: str, name: str
) -> Callable[[NDArray[Any], NDArray[Any]], None]:
    """Return a decoder of ``(blocks, out)`` for a dtype of FALLBACK_DTYPES.

    name: of the tensor, for the message. Raises :class:`MissingPackage` without
    ``gguf``.
    """
    gguf = _package(dtype, name)
    kind = gguf.GGMLQuantizationType[dtype.upper()]

    def decode(blocks: NDArray[Any], out: NDArray[Any]) -> None:
        out[:] = gguf.quants.dequantize(blocks, kind)

    return decode


def codebook(dtype: str) -> NDArray[np.uint8] | None:
    """Return the codebook of a dtype, uint8 [indices, 4 or 8].

    ``None`` for dtypes other than those of FALLBACK_DTYPES. An element is the number of
    a value in the order of their sizes, from 0: of the magnitudes 8, 25 and 43 (iq2),
    of 4, 12, 20, 28, 36, 44, 52 and 62 (iq3_xxs), of the odd numbers to 15 (iq3_s), or
    of -1, 0 and 1 (iq1). Raises
    :class:`MissingPackage` without ``gguf``, from which it is read.
    """
    if dtype not in FALLBACK_DTYPES:
        return None
    return _codebook(_package(dtype, "a tensor"), dtype)


@cache
def _codebook(package: Any, dtype: str) -> NDArray[np.uint8]:
    one = getattr(package.quants, dtype.upper())
    one.init_grid()
    values = one.grid.reshape(one.grid_shape)
    codes = np.searchsorted(np.asarray(one.grid_map, np.float32), values)
    return np.ascontiguousarray(codes, np.uint8)


def _package(dtype: str, name: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPackage(
            f"tensor {name!r}: dtype {dtype} needs the gguf package, which is not "
            f"installed. Try: {install_command('inl-core[gguf]')}"
        ) from error
    return gguf
