"""Encodes images on a backend, with a cache of their features."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.backend.base import CachedMemory
from inl.executor.encoder_executor import EncoderExecutor, load_encoder
from inl.spec.embedded_rows import host_floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.config import EngineConfig
    from inl.executor.vision_model import VisionModel
    from inl.images.qwen_patches import Patches
    from inl.spec.embedded_rows import Floats

MAX_CACHED_BYTES: Final = 256 << 20
"""Bytes of features that are kept for images that come again."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What a language model takes of an image."""

    features: Floats
    """[n, H], in the order of the prompt."""
    grid: tuple[int, int]
    """Rows and columns of features."""
    parts: tuple[int, ...]
    """Features that follow each other in a prompt, with other tokens between parts;
    their sum is n."""
    digest: bytes
    """Of the image, by which blocks of the prefix cache are found."""
    added: Floats
    """[n, F, H], added to hidden states after the F layers that the model names."""

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return self.features.nbytes + self.added.nbytes


class ImageBatch:
    """Images that are encoded by one program, in parts.

    images: patches and digest of each.
    """

    def __init__(
        self, vision: VisionModel, executor: EncoderExecutor,
        images: Sequence[tuple[Patches, bytes]],
    ) -> None:  # fmt: skip
        self._settings, self._images = vision.settings, images
        patches = [each for each, _ in images]
        tokens = sum(len(values) for values, _ in patches)
        rows = sum(sequences_of(vision, each) for each in patches)
        tokens += rows * vision.family.extra_tokens
        bucket = executor.bucket(tokens, rows)
        config: Any = executor.loaded.config
        batch, self._order = vision.family.image_batch(config, patches, bucket)
        self._merge = config.merge
        self.encoding = executor.begin(batch, bucket)

    def results(self) -> list[EncodedImage]:
        """Return the features of each image, once all parts have been computed."""
        results = [host_floats(each) for each in self.encoding.results()]
        places = np.empty(len(self._order), np.intp)
        places[self._order] = np.arange(len(places))
        found, first = [], 0
        for (values, grid), digest in self._images:
            end = first + len(values) // self._merge
            found.append(self._encoded(results, places[first:end], grid, digest))
            first = end
        return found

    def _encoded(
        self, results: Sequence[Floats], places: NDArray[np.intp],
        grid: tuple[int, int], digest: bytes,
    ) -> EncodedImage:  # fmt: skip
        """Return an image. places: of its features in the results of the batch."""
        pieces = self._settings.pieces(grid)
        parts = tuple(each for each in pieces if isinstance(each, int))
        side = self._settings.merge_size
        size = grid[0] // side, grid[1] // side
        features, *others = results
        shape = len(places), len(others), features.shape[1]
        added = np.empty(shape, features.dtype)
        for layer, each in enumerate(others):
            added[:, layer] = each[places]
        return EncodedImage(features[places], size, parts, digest, added)


def own_device(config: EngineConfig) -> str | None:
    """Return the device of ``vision_backend``, ``None`` without one.

    Raises :class:`~inl.errors.DeviceError` for a device that there is not.
    """
    from inl.plugin import choose_device

    if config.vision_backend is None:
        return None
    return str(choose_device(config.vision_backend))


def sequences_of(vision: VisionModel, patches: Patches) -> int:
    """Return the sequences of an image: its tiles and the whole one, or one."""
    values, (rows, columns) = patches
    # Beside tiles, whose patches the grid counts, there is the whole image.
    if len(values) == rows * columns:
        return 1
    return sum(isinstance(each, int) for each in vision.settings.pieces(patches.grid))


class VisionEncoder:
    """A vision encoder with its weights on a device.

    Thread-safe are ``cached`` and ``keep``; one thread at a time computes.
    """

    def __init__(self, vision: VisionModel, executor: EncoderExecutor) -> None:
        self.vision, self.executor = vision, executor
        self._cache: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def load(cls, vision: VisionModel, config: EngineConfig) -> VisionEncoder:
        """Load the weights on a device of this process, as the config says."""
        from inl.plugin import make_backend

        backend = make_backend(config.vision_backend or config.backend)
        return cls(vision, load_encoder(vision, backend, config))

    def cached(self, digest: bytes) -> EncodedImage | None:
        """Return the features of an image that was encoded before, if they are kept."""
        with self._lock:
            found = self._cache.pop(digest, None)
            if found is not None:
                self._cache[digest] = found
        return found

    def keep(self, image: EncodedImage) -> None:
        """Cache the features of an image; the least recently used ones are evicted."""
        with self._lock:
            if (old := self._cache.pop(image.digest, None)) is not None:
                self._cached_bytes -= old.nbytes
            self._cached_bytes += image.nbytes
            self._cache[image.digest] = image
            while self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.nbytes

    def begin(self, images: Sequence[tuple[Patches, bytes]]) -> ImageBatch:
        """Return a batch of images, by their patches and digests, to be computed."""
        return ImageBatch(self.vision, self.executor, images)

    def encode(self, patches: Patches, digest: bytes) -> EncodedImage:
        """Return the features of one image; waits for the device."""
        batch = self.begin([(patches, digest)])
        batch.encoding.advance(batch.encoding.parts)
        (found,) = batch.results()
        self.keep(found)
        return found

    def close(self) -> None:
        """Free the weights. Closing twice is allowed."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0
        self.executor.release()
        if (cached := self.executor.backend.offers(CachedMemory)) is not None:
            cached.release()
