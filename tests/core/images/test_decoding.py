"""Images of every mode and hostile files, decoded in a process of its own."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inl.errors import RequestError
from inl.images import decoding
from inl.images.decoding import ImageDecoder

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")

KINDS = ("png", "jpeg", "gif", "webp", "bmp")


@pytest.fixture(scope="module")
def decoder():
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


def picture(width, height, mode="RGB", seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file(image, kind="png", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def uri(data, media):
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def expected(data):
    return np.asarray(
        ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    )


def check(decoder, data):
    """Compare with Pillow in this process."""
    pixels = expected(data)
    assert np.array_equal(decoder.decode(data).pixels, pixels)
    assert decoder.size(data) == pixels.shape[:2]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16"])
def test_png_of_every_mode(decoder, mode):
    if mode == "I;16":
        values = np.random.default_rng(1).integers(0, 1 << 16, (31, 17), np.uint16)
        image = Image.fromarray(values)
    elif mode == "PA":
        image = picture(17, 31).convert("P")
        image.info["transparency"] = 3
    else:
        image = picture(17, 31, mode)
    check(decoder, file(image))


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "YCbCr"])
def test_jpeg_of_every_mode(decoder, mode):
    check(decoder, file(picture(17, 31, mode), "jpeg"))
    check(decoder, file(picture(17, 31, mode), "jpeg", progressive=True))


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(decoder, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    check(decoder, file(picture(17, 31), kind, exif=exif))


@pytest.mark.parametrize("kind", ["png", "gif", "webp"])
def test_the_first_frame_of_an_animation(decoder, kind):
    frames = [picture(20, 30, seed=seed) for seed in range(3)]
    data = file(frames[0], kind, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 3
    check(decoder, data)


def bomb(side):
    """A PNG of a few bytes, whose header states so many pixels a side."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), b"IDAT": b""}
    parts = [
        struct.pack(">I", len(data))
        + name
        + data
        + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    ]
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts])


@pytest.mark.parametrize("side", [9000, 20_000, 2_000_000_000])
def test_pixels_are_bounded_before_they_are_decoded(decoder, side):
    for read in (decoder.decode, decoder.size):
        with pytest.raises(RequestError, match=f"found {side} x {side} pixels, accep"):
            read(bomb(side))


def test_bytes_are_bounded(decoder):
    for value in (bytes((32 << 20) + 1), uri(bytes((32 << 20) + 1), "image/png")):
        with pytest.raises(RequestError, match="more than 33554432 bytes"):
            decoder.decode(value)


def test_the_size_of_a_file_is_read_without_its_pixels(decoder):
    whole = file(picture(60, 50))
    for kind in KINDS:
        data = file(picture(60, 50), kind)
        assert decoder.size(data) == (50, 60)
    assert decoder.size(whole[: len(whole) // 2]) == (50, 60)


@pytest.mark.parametrize("limit", ["CPU_SECONDS = 0.02", "MEMORY = 16 << 20"])
def test_time_and_memory_of_decoding_are_bounded(monkeypatch, limit):
    """What ends the process leaves the next image to another one."""
    program = f"import inl.images.decoding_process as p; p.{limit}; p.main()"
    monkeypatch.setattr(decoding, "PROGRAM", program)
    decoder, small = ImageDecoder(), file(picture(5, 4))
    data = file(Image.new("RGB", (6000, 5000)))
    assert len(data) < 200_000
    assert decoder.size(data) == (5000, 6000)
    with pytest.raises(RequestError, match=r"decoded|more than 16 MiB"):
        decoder.decode(data)
    check(decoder, small)
    decoder.close()
    monkeypatch.undo()
    assert decoder.decode(data).pixels.shape == (5000, 6000, 3)
    decoder.close()


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files_are_refused(decoder, kind):
    data = file(picture(40, 30), kind)
    for size in (0, 1, 10, len(data) // 4, len(data) // 2, len(data) - 40):
        with pytest.raises(RequestError, match="cannot be decoded"):
            decoder.decode(data[:size])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_decoded(decoder, kind):
    rng, whole = np.random.default_rng(7), file(picture(40, 30), kind)
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 9)):
            data[at] = rng.integers(256)
        try:
            found = decoder.decode(bytes(data))
        except RequestError:
            refused += 1
        else:
            assert found.pixels.ndim == 3
    assert refused
    check(decoder, whole)


@pytest.mark.parametrize(
    ("media", "kind", "message"),
    [
        ("image/png", "jpeg", "found JPEG data of type image/png"),
        ("image/webp", "gif", "found GIF data of type image/webp"),
        ("image/svg+xml", "png", "accepts data:TYPE;base64,DATA of types image/png"),
        ("image/tiff", "tiff", "accepts data:TYPE"),
        ("image/*", "tiff", "cannot be decoded"),
        ("text/html", "png", "accepts data:TYPE"),
        ("", "png", "accepts data:TYPE"),
    ],
)
def test_types_must_be_those_of_the_data(decoder, media, kind, message):
    with pytest.raises(RequestError, match=message):
        decoder.decode(uri(file(picture(5, 4), kind), media))


@pytest.mark.parametrize("media", ["image/jpeg", "image/jpg", "IMAGE/JPEG", "image/*"])
def test_types_of_data_that_are_accepted(decoder, media):
    data = file(picture(5, 4), "jpeg")
    assert np.array_equal(decoder.decode(uri(data, media)).pixels, expected(data))


@pytest.mark.parametrize(
    "value",
    ["data:image/png;base64", "data:image/png,abc", "data:", "data:,", "", "\0"],
)
def test_text_that_is_no_image(decoder, value):
    with pytest.raises(RequestError, match=r"^here: "):
        decoder.decode(value, "here")


def test_threads_get_their_own_images(decoder):
    files = [file(picture(20 + at, 30, seed=at)) for at in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(decoder.decode, files * 4))
    for each, data in zip(found, files * 4, strict=True):
        assert np.array_equal(each.pixels, expected(data))
    assert len({each.digest for each in found}) == 12
