"""Decodes images from files, bytes and data URIs, with bounds checked before."""

from __future__ import annotations

import base64
import binascii
import json
import sys
import threading
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from inl.bounded_child import START_SECONDS, BoundedChild, describe_end
from inl.errors import MissingPackage, RequestError
from inl.forks import on_fork
from inl.images.decoding_process import (
    CPU_SECONDS,
    MAX_PIXELS,
    MEMORY,
    upright_size,
)
from inl.install_command import install_command

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES: Final = 32 << 20
"""Largest file of an image."""
TYPES: Final = {
    "image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/gif": "GIF",
    "image/webp": "WEBP", "image/bmp": "BMP", "image/*": None,
}  # fmt: skip
"""Media types of data URIs and their formats; the last one stands for any."""
PROGRAM: Final = "from inl.images.decoding_process import main; main()"


class Size(NamedTuple):
    """Pixels of an upright image."""

    height: int
    width: int


class Picture(NamedTuple):
    """A decoded image."""

    pixels: NDArray[np.uint8]
    """[height, width, 3] RGB."""
    digest: bytes
    """SHA-256 of size and pixels."""


@final
class ImageDecoder:
    """Decodes images in a child process, one at a time. Thread-safe.

    An image is one of Pillow, whose file the caller has opened, the bytes or the path
    of a file, or a data URI. It is turned upright as its EXIF data say, and its
    transparency is ignored, as transformers does. The process starts with the first
    file and serves all later ones until one ends it; a forked child of this process
    starts its own.

    Methods raise :class:`~inl.errors.RequestError` for anything else, for more than
    :data:`MAX_BYTES` or :data:`MAX_PIXELS`, for damaged files, and for those that take
    too long; and :class:`~inl.errors.MissingPackage` without Pillow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: BoundedChild | None = None
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Leave the process, and the lock, to the parent's threads."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.disconnect()
            self._process = None

    def size(self, value: Any, where: str = "image") -> Size:
        """Return the size of an image, as its header states it."""
        if not isinstance(value, str | Path | bytes | bytearray | memoryview):
            return _pillow_size(value, where)
        size, _ = self._read(value, where, with_pixels=False)
        return size

    def decode(self, value: Any, where: str = "image") -> Picture:
        """Return the pixels of an image."""
        if not isinstance(value, str | Path | bytes | bytearray | memoryview):
            return _of_pillow(value, where)
        size, data = self._read(value, where, with_pixels=True)
        return _picture(np.frombuffer(data, np.uint8).reshape(*size, 3))

    def close(self) -> None:
        """End the process; a later image starts another."""
        with self._lock:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def _read(
        self, value: Any, where: str, *, with_pixels: bool
    ) -> tuple[Size, bytearray]:
        """Return the size of a file's image and, if they are wanted, its pixels."""
        data, media = _file(value, where)
        with self._lock:
            reply, pixels = self._exchange(data, where, with_pixels=with_pixels)
        if "error" in reply:
            raise RequestError(f"{where}: {reply['error']}")
        if media is not None and TYPES[media] not in (None, reply["format"]):
            raise RequestError(
                f"{where}: found {reply['format']} data of type {media}, accepts the "
                "type of the data"
            )
        return Size(reply["height"], reply["width"]), pixels

    def _exchange(
        self, data: bytes, where: str, *, with_pixels: bool
    ) -> tuple[dict[str, Any], bytearray]:
        # After an interrupt, the reply must not be taken for the next one's: the
        # process is kept only once its reply has arrived.
        process, self._process = self._process, None
        if process is None or process.has_ended:
            process = _open(where)
        process.send(json.dumps([len(data), with_pixels]).encode() + b"\n")
        process.send(data)
        seconds = START_SECONDS + CPU_SECONDS if process.is_starting else START_SECONDS
        reply: dict[str, Any] | None = process.receive(seconds)
        pixels: bytearray | None = bytearray()
        if reply is not None and with_pixels and "error" not in reply:
            process.send(b"\n")
            pixels = process.receive_bytes(reply["height"] * reply["width"] * 3)
        if reply is None or pixels is None:
            accepted = (
                f"accepted: an image that is decoded in {CPU_SECONDS:g} s of processor "
                f"time and {MEMORY >> 20} MiB of memory"
            )
            ending = describe_end(process.exit_status(), accepted)
            raise RequestError(f"{where}: cannot be decoded: {ending}")
        process.is_starting = False
        self._process = process
        return reply, pixels


def _open(where: str) -> BoundedChild:
    _check_pillow(where)
    try:
        return BoundedChild(PROGRAM)
    except OSError as error:
        raise RequestError(
            f"{where}: {sys.executable} cannot start: {error.strerror}"
        ) from error


def _check_pillow(where: str) -> None:
    if find_spec("PIL") is None:
        raise MissingPackage(
            f"{where}: needs Pillow; try: {install_command('inl-core[vision]')}"
        )


def _pillow_size(image: Any, where: str) -> Size:
    """Return the size of an image of Pillow, once it is upright."""
    _check_pillow(where)
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise RequestError(
            f"{where}: found {type(image).__name__}, accepts an image of Pillow, "
            "bytes, a path or a data URI"
        )
    width, height = upright_size(image)
    if not 1 <= width * height <= MAX_PIXELS:
        raise RequestError(
            f"{where}: found {width} x {height} pixels, accepts 1 to {MAX_PIXELS}"
        )
    return Size(height, width)


def _of_pillow(image: Any, where: str) -> Picture:
    """Return the pixels of an image of Pillow."""
    _pillow_size(image, where)
    from PIL import ImageOps

    try:
        return _picture(np.array(ImageOps.exif_transpose(image).convert("RGB")))
    # Decoders raise errors of many types for damaged files, which are read now.
    except Exception as error:
        raise RequestError(
            f"{where}: cannot be decoded ({error!s:.80})"
        ) from None  # the cause is no fault of this process, as an OSError would be


def _picture(pixels: NDArray[np.uint8]) -> Picture:
    digest = sha256(np.array(pixels.shape, "<i4").tobytes())
    digest.update(np.ascontiguousarray(pixels).data)
    return Picture(pixels, digest.digest())


def _file(value: Any, where: str) -> tuple[bytes, str | None]:
    """Return the bytes of a file, and the media type of a data URI."""
    media = None
    if isinstance(value, str) and value.startswith("data:"):
        data, media = _of_uri(value, where)
    elif isinstance(value, str | Path):
        try:
            with Path(value).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise RequestError(f"{where}: {error!s:.120}") from None
    else:
        data = bytes(value)
    if len(data) > MAX_BYTES:
        raise RequestError(f"{where}: found more than {MAX_BYTES} bytes")
    return data, media


def _of_uri(uri: str, where: str) -> tuple[bytes, str]:
    """Return the bytes of a data URI in base64, and its media type."""
    start = len("data:")
    comma = uri.find(",", start, start + 128)
    media, _, rest = uri[start : max(comma, start)].lower().partition(";")
    if media not in TYPES or rest.rpartition(";")[2] != "base64":
        raise RequestError(
            f"{where}: found {uri[:60]!r}, accepts data:TYPE;base64,DATA of types "
            f"{', '.join(TYPES)}"
        )
    text = uri[comma + 1 :]
    if len(text) > (MAX_BYTES // 3 + 2) * 4:
        raise RequestError(f"{where}: found more than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True), media
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where}: {error}; accepts base64") from error
