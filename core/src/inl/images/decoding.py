"""Decodes images from files, bytes and data URIs, with bounds checked before."""

from __future__ import annotations

import base64
import binascii
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.errors import MissingPackage, RequestError
from inl.install_command import install_command

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES: Final = 32 << 20
"""Largest file of an image."""
MAX_PIXELS: Final = 1 << 26
"""Most pixels of an image, which its header states before anything is decoded."""
FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""Formats that are decoded; of an animated image its first frame."""


class Picture(NamedTuple):
    """A decoded image."""

    pixels: NDArray[np.uint8]
    """[height, width, 3] RGB."""
    digest: bytes
    """SHA-256 of size and pixels."""


def decode(value: Any, where: str = "image") -> Picture:
    """Decode an image: of Pillow, the bytes or the path of a file, or a data URI.

    It is turned upright as its EXIF data say, and its transparency is ignored, as
    transformers does. Raises :class:`~inl.errors.RequestError` for anything else, for
    more than :data:`MAX_BYTES` or :data:`MAX_PIXELS`, and for damaged files; and
    :class:`~inl.errors.MissingPackage` without Pillow.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingPackage(
            f"{where}: needs Pillow; try: {install_command('inl-core[vision]')}"
        ) from error
    try:
        image = value
        if not isinstance(value, Image.Image):
            image = Image.open(BytesIO(_read(value, where)), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS or not width * height:
            raise RequestError(
                f"{where}: found {width} x {height} pixels, accepts 1 to {MAX_PIXELS}"
            )
        upright = ImageOps.exif_transpose(image).convert("RGB")
    except RequestError:
        raise
    # Decoders raise errors of many types for damaged files.
    except Exception as error:
        raise RequestError(
            f"{where}: cannot be decoded ({error!s:.80}); "
            f"accepted: {', '.join(FORMATS)}"
        ) from None  # the cause is no fault of this process, as an OSError would be
    pixels = np.array(upright)
    digest = sha256(np.array(pixels.shape, "<i4").tobytes())
    digest.update(np.ascontiguousarray(pixels).data)
    return Picture(pixels, digest.digest())


def _read(value: Any, where: str) -> bytes:
    """Return the bytes of a file."""
    if isinstance(value, str) and value.startswith("data:"):
        return _of_uri(value, where)
    if isinstance(value, str | Path):
        path = Path(value)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise RequestError(f"{where}: {error!s:.120}") from None
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    else:
        raise RequestError(
            f"{where}: found {type(value).__name__}, accepts an image of Pillow, "
            "bytes, a path or a data URI"
        )
    if len(data) > MAX_BYTES:
        raise RequestError(f"{where}: found more than {MAX_BYTES} bytes")
    return data


def _of_uri(uri: str, where: str) -> bytes:
    """Return the bytes of a data URI in base64."""
    head, comma, text = uri.partition(",")
    if not comma or not head.endswith(";base64") or not head.startswith("data:image/"):
        raise RequestError(
            f"{where}: found {head[:60]!r}, accepts data:image/TYPE;base64,DATA"
        )
    if len(text) > MAX_BYTES // 3 * 4 + 4:
        raise RequestError(f"{where}: found more than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where}: {error}; accepts base64") from error
