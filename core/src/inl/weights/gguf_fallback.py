"""Decoders of the ``gguf`` package, for dtypes with large published codebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from inl.errors import MissingPackage

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
    try:
        import gguf
    except ImportError as error:
        raise MissingPackage(
            f"tensor {name!r}: dtype {dtype} needs the gguf package, which is not "
            "installed. Try: pip install 'inl-core[gguf]'"
        ) from error
    kind = gguf.GGMLQuantizationType[dtype.upper()]

    def decode(blocks: NDArray[Any], out: NDArray[Any]) -> None:
        out[:] = gguf.quants.dequantize(blocks, kind)

    return decode
