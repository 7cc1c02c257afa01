"""Kinds that need large published codebooks: decoded by the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from inl.errors import MissingPackage

if TYPE_CHECKING:
    from numpy.typing import NDArray

BORROWED: Final = (
    "iq1_s",
    "iq1_m",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
)


def borrowed(dtype: str, name: str) -> Callable[[NDArray[Any], NDArray[Any]], None]:
    """Decoder of ``(blocks, out)``; raises :class:`MissingPackage` without ``gguf``."""
    try:
        import gguf
    except ImportError as error:
        raise MissingPackage(
            f"tensor {name!r}: kind {dtype} is decoded by the gguf package, which is "
            "not installed. Try: pip install 'inl-core[gguf]'"
        ) from error
    kind = gguf.GGMLQuantizationType[dtype.upper()]

    def decode(blocks: NDArray[Any], out: NDArray[Any]) -> None:
        out[:] = gguf.quants.dequantize(blocks, kind)

    return decode
