"""Images in prompts: places of their features, and positions along axes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.errors import RequestError
from inl.images.frames import ACCEPTED, frame_uris
from inl.spec.embedded_rows import as_array

if TYPE_CHECKING:
    from inl.executor.vision_encoder import EncodedImage
    from inl.spec.embedded_rows import Floats

MAX_IMAGES = 256
"""Most images of a prompt."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
VIDEO_PARTS = ("video", "video_url")
"""Types of the parts that are the frames of a video, each of them an image."""


class PlacedImage(NamedTuple):
    """An image, and the positions of the first feature of each of its parts."""

    image: EncodedImage
    starts: tuple[int, ...]

    @property
    def parts(self) -> Iterator[tuple[int, int, int]]:
        """The first position and end of each part, and its first feature."""
        feature = 0
        for start, count in zip(self.starts, self.image.parts, strict=True):
            yield start, start + count, feature
            feature += count


class PromptImages(PromptEmbeddings):
    """The features of a prompt's images, and what they do to positions.

    images: in the order of the prompt. has_axes: whether a token has the positions of
    an image's grid (time, row, column) where it is a feature; text continues after the
    largest of them (Wang et al., 2024).
    has_spans: whether the features of a part attend to each other in both directions.
    """

    def __init__(
        self,
        images: Sequence[PlacedImage],
        prompt_tokens: int,
        *,
        has_axes: bool,
        has_spans: bool,
    ) -> None:
        super().__init__(
            {
                first: as_array(placed.image.features[feature : feature + end - first])
                for placed in images
                for first, end, feature in placed.parts
            },
            prompt_tokens,
        )
        self._placed, self._has_axes, self._has_spans = images, has_axes, has_spans
        self._parts = [
            (first, end, feature, placed.image)
            for placed in images
            for first, end, feature in placed.parts
        ]
        """First position, end and first feature of the parts of images, in order."""
        self._ends = [end for _, end, *_ in self._parts]
        self._starts = [placed.starts[0] for placed in images]
        self._shifts = [0]
        """Of text before the first image and after each: its position minus that in
        the sequence."""
        for image, _ in images:
            rows, columns = image.grid
            shift = max(rows, columns) - rows * columns
            self._shifts.append(self._shifts[-1] + shift)

    @property
    def moves(self) -> bool:
        return self._has_axes

    @property
    def longest_span(self) -> int:
        if not self._has_spans:
            return 0
        return max((end - first for first, end, *_ in self._parts), default=0)

    def whole(self, position: int) -> int:
        for first, *_ in (
            self._within(position, position + 1) if self._has_spans else ()
        ):
            return first
        return position

    def _within(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, int, int, EncodedImage]]:
        """Yield the parts of images that have a position in a range."""
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            if self._parts[number][0] >= stop:
                return
            yield self._parts[number]

    def spans(self, start: int, stop: int) -> dict[int, tuple[int, int]]:
        """Return the first position and end of the spans of a range's positions."""
        return {
            at: (first, end)
            for first, end, *_ in (self._within(start, stop) if self._has_spans else ())
            for at in range(max(first, start), min(end, stop))
        }

    def offsets(self, start: int, stop: int) -> dict[int, tuple[int, ...]]:
        """Return the offsets of positions ``start`` to ``stop - 1`` that have any."""
        found = {at: self._offset(at) for at in range(start, stop)}
        return {at: offset for at, offset in found.items() if any(offset)}

    def _offset(self, position: int) -> tuple[int, ...]:
        number = bisect_right(self._starts, position)
        if not number:
            return (0, 0, 0)
        image, (first, *_) = self._placed[number - 1]
        rows, columns = image.grid
        place = position - first
        if place >= rows * columns:
            return (self._shifts[number],) * 3
        row, column = divmod(place, columns)
        before = self._shifts[number - 1] - place
        return before, before + row, before + column

    def added(self, start: int, stop: int) -> dict[int, Floats]:
        """Return the features [F, H] that layers add at positions of a range."""
        return {
            at: image.added[feature + at - first]
            for first, end, feature, image in self._within(start, stop)
            for at in range(max(first, start), min(stop, end))
        }

    def digest(self, start: int, stop: int) -> bytes:
        """Return a digest of the images in a range, and where they lie in it."""
        parts = [
            (first - start).to_bytes(8, "little", signed=True)
            + feature.to_bytes(4, "little")
            + image.digest
            for first, _, feature, image in self._within(start, stop)
        ]
        return sha256(b"".join(parts)).digest() if parts else b""


def without_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return messages as templates take them, and the images of their parts, in order.

    An image is a part ``{"type": "image", "image": X}`` or ``{"type": "image_url",
    "image_url": {"url": X}}``; X is an image of Pillow, bytes, a path or a data URI.
    ``{"type": "video", "video": [X, ...]}`` is an image for each frame, as is
    ``{"type": "video_url", "video_url": {"url": U}}`` of
    :func:`~inl.images.frames.frame_uris`. Raises :class:`~inl.errors.RequestError`.
    """
    images: list[Any] = []
    plain = []
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple) and any(map(is_image, content)):
            parts = []
            for number, part in enumerate(content):
                if not is_image(part):
                    parts.append(part)
                    continue
                where = f"messages[{at}].content[{number}]"
                if part["type"] in VIDEO_PARTS:
                    found = frames_of(part, where)
                else:
                    found = [image_of(part, where)]
                images += found
                parts += [{"type": "image"}] * len(found)
            message = {**message, "content": parts}
        plain.append(message)
    check_count(images)
    return plain, images


def check_count(images: Sequence[Any]) -> None:
    """Raise :class:`~inl.errors.RequestError` for more than :data:`MAX_IMAGES`."""
    if len(images) > MAX_IMAGES:
        raise RequestError(f"images: found {len(images)}, accepts at most {MAX_IMAGES}")


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image, or frames of a video."""
    kinds = IMAGE_PARTS + VIDEO_PARTS
    return isinstance(part, Mapping) and part.get("type") in kinds


def frames_of(part: Mapping[str, Any], where: str) -> list[Any]:
    """Return the images of a video; raises :class:`~inl.errors.RequestError`."""
    value = part.get("video", part.get("video_url"))
    if isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, str):
        value = frame_uris(value)
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(f"{where}: found a video, accepts its {ACCEPTED}")
    return [
        image_of({"image": frame}, f"{where}.video[{number}]")
        for number, frame in enumerate(value)
    ]


def image_of(part: Mapping[str, Any], where: str) -> Any:
    """Return the image of a part; raises :class:`~inl.errors.RequestError`."""
    value = part.get("image", part.get("image_url"))
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise RequestError(f"{where}: found no image, accepts one in 'image'")
    # Addresses and paths in messages would read what their sender has no right to.
    if isinstance(value, str) and not value.startswith("data:"):
        raise RequestError(
            f"{where}: found {value[:60]!r}, accepts a data URI; give a file as a "
            f"{Path.__name__} or as bytes"
        )
    return value


def check_places(found: int, images: int) -> None:
    """Raise :class:`~inl.errors.RequestError` for another number of places."""
    if found != images:
        raise RequestError(
            f"images: found {images} for {found} places in the prompt, accepts as many"
        )


def expanded(
    ids: Sequence[int], placeholder: int, images: Sequence[Sequence[int]]
) -> list[int]:
    """Return token ids with the tokens of an image in place of each placeholder.

    Raises :class:`~inl.errors.RequestError` for another number of placeholders.
    """
    tokens = iter(images)
    check_places(sum(token == placeholder for token in ids), len(images))
    longer: list[int] = []
    for token in ids:
        longer += next(tokens) if token == placeholder else [token]
    return longer


def placed(
    ids: Sequence[int],
    placeholder: int,
    images: Sequence[EncodedImage],
    *,
    has_axes: bool,
    has_spans: bool,
) -> PromptImages:
    """Return the features of images at the placeholders of token ids, in order.

    Raises :class:`~inl.errors.RequestError` unless the placeholders of each part of an
    image follow each other and there are no others.
    """
    found: list[PlacedImage] = []
    at = 0
    for number, image in enumerate(images):
        starts = []
        for count in image.parts:
            while at < len(ids) and ids[at] != placeholder:
                at += 1
            if list(ids[at : at + count]) != [placeholder] * count:
                raise RequestError(
                    f"images[{number}]: has {count} features, found fewer placeholders "
                    f"(token {placeholder}) in a row; accepts one for each"
                )
            starts.append(at)
            at += count
        found.append(PlacedImage(image, tuple(starts)))
    if placeholder in ids[at:]:
        raise RequestError(
            f"prompt: found placeholders (token {placeholder}) of more than the "
            f"{len(images)} images"
        )
    return PromptImages(found, len(ids), has_axes=has_axes, has_spans=has_spans)
