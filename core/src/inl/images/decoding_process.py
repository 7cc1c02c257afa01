"""Process that decodes images: untrusted files, for libraries that parse them in C.

Protocol: a line of JSON, the bytes of a file and whether its pixels are wanted, then
the file. A reply is a line of JSON, ``{"height", "width", "format"}`` or ``{"error"}``;
if pixels are wanted they follow, [height, width, 3] RGB, once the parent has sent an
empty line.
"""

from __future__ import annotations

import json
import sys
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from inl.bounded_child import (
    allow_kill_by_time,
    killed_after,
    limit_address_space,
    used_address_space,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

MAX_PIXELS: Final = 1 << 26
"""Most pixels of an image, which its header states before anything is decoded."""
FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""Formats that are decoded; of an animated image its first frame."""
CPU_SECONDS: Final = 10.0
"""Processor time after which the process is killed."""
MEMORY: Final = 1280 << 20
"""Bytes of an image while it is decoded: five times its pixels in four bytes each."""
ORIENTATION: Final = 0x0112
"""Tag of EXIF data: how the pixels must be turned."""
PNG_MARKS: Final = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""What a PNG with an orientation has, maybe behind its pixels: Pillow decodes all."""
BAND: Final = 1 << 20
"""Pixels that are written at once."""


def main() -> None:
    """Decode images until standard input ends."""
    from PIL import Image

    Image.init()  # its libraries, before memory is limited
    Image.MAX_IMAGE_PIXELS = None  # read() checks the pixels, and names the limit
    limit_address_space(used_address_space() + MEMORY)
    allow_kill_by_time()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while line := source.readline():
        size, with_pixels = json.loads(line)
        data = source.read(size)
        image: PillowImage | None = None
        with killed_after(CPU_SECONDS):
            try:
                reply, image = read(data, with_pixels=with_pixels)
            # Decoders raise errors of many types for damaged files.
            except BaseException as error:
                reply = {"error": describe(error)}
        target.write(json.dumps(reply).encode() + b"\n")
        target.flush()
        if image is not None and source.readline():
            rows = max(BAND // image.width, 1)
            for top in range(0, image.height, rows):
                bottom = min(top + rows, image.height)
                target.write(image.crop((0, top, image.width, bottom)).tobytes())
            target.flush()
        del data, image


def read(data: bytes, *, with_pixels: bool) -> tuple[dict[str, Any], Any]:
    """Return the reply for a file, and its upright image if pixels are wanted."""
    from PIL import Image, ImageOps

    image: Any = Image.open(BytesIO(data), formats=FORMATS)
    kind = image.format
    width, height = image.size
    if not 1 <= width * height <= MAX_PIXELS:
        return {
            "error": f"found {width} x {height} pixels, accepts 1 to {MAX_PIXELS}"
        }, None
    if not with_pixels:
        if image.format != "PNG" or any(mark in data for mark in PNG_MARKS):
            width, height = upright_size(image)
        return {"height": height, "width": width, "format": kind}, None
    # Of an image without EXIF data this returns a copy.
    upright = ImageOps.exif_transpose(image)
    del image
    upright = upright.convert("RGB")
    return {"height": upright.height, "width": upright.width, "format": kind}, upright


def upright_size(image: PillowImage) -> tuple[int, int]:
    """Return the width and height of an image that is turned as its EXIF data say."""
    width, height = image.size
    is_turned = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return (height, width) if is_turned else (width, height)


def describe(error: BaseException) -> str:
    """Return why a file cannot be decoded."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MEMORY >> 20} MiB of memory"
    text = str(error).replace("\n", " ") or type(error).__name__
    return f"cannot be decoded ({text:.80}); accepted: {', '.join(FORMATS)}"
