"""Images in prompts: places of their features, and positions along axes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.executor.vision_encoder import EncodedImage

MAX_IMAGES = 256
"""Most images of a prompt."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""


class PromptImages(PromptEmbeddings):
    """The features of a prompt's images, and what they do to positions.

    images: by the position of their first feature. A token has the positions of an
    image's grid (time, row, column) where it is a feature; text continues after the
    largest of them (Wang et al., 2024).
    """

    def __init__(self, images: Mapping[int, EncodedImage], prompt_tokens: int) -> None:
        spans = {start: image.features for start, image in images.items()}
        super().__init__(spans, prompt_tokens)
        self._starts = sorted(images)
        self._images = [images[start] for start in self._starts]
        self._shifts = [0]
        """Of text before the first image and after each: its position minus that in
        the sequence."""
        for image in self._images:
            rows, columns = image.grid
            shift = max(rows, columns) - rows * columns
            self._shifts.append(self._shifts[-1] + shift)

    @property
    def moves(self) -> bool:
        return True

    def offsets(self, start: int, stop: int) -> dict[int, tuple[int, ...]]:
        """Return the offsets of positions ``start`` to ``stop - 1`` that have any."""
        found = {at: self._offset(at) for at in range(start, stop)}
        return {at: offset for at, offset in found.items() if any(offset)}

    def _offset(self, position: int) -> tuple[int, ...]:
        number = bisect_right(self._starts, position)
        if not number:
            return (0, 0, 0)
        first, image = self._starts[number - 1], self._images[number - 1]
        rows, columns = image.grid
        place = position - first
        if place >= rows * columns:
            return (self._shifts[number],) * 3
        row, column = divmod(place, columns)
        before = self._shifts[number - 1] - place
        return before, before + row, before + column

    def added(self, start: int, stop: int) -> dict[int, NDArray[np.float32]]:
        """Return the features [F, H] that layers add at positions of a range."""
        found: dict[int, NDArray[np.float32]] = {}
        for first, image in zip(self._starts, self._images, strict=True):
            end = min(stop, first + len(image.features))
            for at in range(max(first, start), end):
                found[at] = image.added[at - first]
        return found

    def digest(self, start: int, stop: int) -> bytes:
        """Return a digest of the images in a range, and where they lie in it."""
        parts = [
            (first - start).to_bytes(8, "little", signed=True) + image.digest
            for first, image in zip(self._starts, self._images, strict=True)
            if first < stop and start < first + len(image.features)
        ]
        return sha256(b"".join(parts)).digest() if parts else b""


def without_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return messages as templates take them, and the images of their parts, in order.

    An image is a part ``{"type": "image", "image": X}`` or ``{"type": "image_url",
    "image_url": {"url": X}}``; X is an image of Pillow, bytes, a path or a data URI.
    Raises :class:`~inl.errors.RequestError`.
    """
    images: list[Any] = []
    plain = []
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple) and any(map(is_image, content)):
            parts = []
            for number, part in enumerate(content):
                if is_image(part):
                    where = f"messages[{at}].content[{number}]"
                    images.append(image_of(part, where))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        plain.append(message)
    return plain, images


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


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


def expanded(ids: Sequence[int], placeholder: int, counts: Sequence[int]) -> list[int]:
    """Return token ids with a placeholder for each feature in place of each one.

    Raises :class:`~inl.errors.RequestError` for another number of placeholders.
    """
    numbers = iter(counts)
    found = sum(token == placeholder for token in ids)
    if found != len(counts):
        raise RequestError(
            f"images: found {len(counts)} for {found} places in the prompt, accepts "
            "as many"
        )
    longer: list[int] = []
    for token in ids:
        longer += [token] * next(numbers) if token == placeholder else [token]
    return longer


def placed(
    ids: Sequence[int], placeholder: int, images: Sequence[EncodedImage]
) -> PromptImages:
    """Return the features of images at the placeholders of token ids, in order.

    Raises :class:`~inl.errors.RequestError` unless each image's placeholders follow
    each other and there are no others.
    """
    starts: dict[int, EncodedImage] = {}
    at = 0
    for number, image in enumerate(images):
        count = len(image.features)
        while at < len(ids) and ids[at] != placeholder:
            at += 1
        if list(ids[at : at + count]) != [placeholder] * count:
            raise RequestError(
                f"images[{number}]: has {count} features, found fewer placeholders "
                f"(token {placeholder}) in a row; accepts one for each"
            )
        starts[at] = image
        at += count
    if placeholder in ids[at:]:
        raise RequestError(
            f"prompt: found placeholders (token {placeholder}) of more than the "
            f"{len(images)} images"
        )
    return PromptImages(starts, len(ids))
