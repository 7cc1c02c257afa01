"""Encodes images on a backend, with a cache of their features."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.backend.base import CachedMemory
from inl.executor.encoder_executor import EncoderExecutor, load_encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.config import EngineConfig
    from inl.executor.vision_model import VisionModel
    from inl.images.qwen_patches import Patches

MAX_CACHED_BYTES: Final = 256 << 20
"""Bytes of features that are kept for images that come again."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What a language model takes of an image."""

    features: NDArray[np.float32]
    """[n, H], in the order of the prompt."""
    grid: tuple[int, int]
    """Rows and columns of features."""
    parts: tuple[int, ...]
    """Features that follow each other in a prompt, with other tokens between parts;
    their sum is n."""
    digest: bytes
    """Of the image, by which blocks of the prefix cache are found."""
    added: NDArray[np.float32]
    """[n, F, H], added to hidden states after the F layers that the model names."""

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return self.features.nbytes + self.added.nbytes


class VisionEncoder:
    """A vision encoder with its weights on a device. Not thread-safe."""

    def __init__(self, vision: VisionModel, executor: EncoderExecutor) -> None:
        self.vision, self.executor = vision, executor
        self._cache: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._cached_bytes = 0

    @classmethod
    def load(cls, vision: VisionModel, config: EngineConfig) -> VisionEncoder:
        """Load the weights on ``config.backend``, a device of this process."""
        from inl.plugin import make_backend

        backend = make_backend(config.backend)
        return cls(vision, load_encoder(vision, backend, config))

    def cached(self, digest: bytes) -> EncodedImage | None:
        """Return the features of an image that was encoded before, if they are kept."""
        found = self._cache.pop(digest, None)
        if found is not None:
            self._cache[digest] = found
        return found

    def encode(self, patches: Patches, digest: bytes) -> EncodedImage:
        """Return the features of an image by its patches; waits for the device."""
        found = self._compute(patches, digest)
        self._cached_bytes += found.nbytes
        self._cache[digest] = found
        while self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return found

    def close(self) -> None:
        """Free the weights. Closing twice is allowed."""
        self._cache.clear()
        self._cached_bytes = 0
        self.executor.release()
        if (cached := self.executor.backend.offers(CachedMemory)) is not None:
            cached.release()

    def _compute(self, patches: Patches, digest: bytes) -> EncodedImage:
        values, grid = patches
        config: Any = self.executor.loaded.config
        pieces = self.vision.settings.pieces(grid)
        parts = tuple(each for each in pieces if isinstance(each, int))
        # Beside tiles, whose patches the grid counts, there is the whole image.
        is_tiled = len(values) > grid[0] * grid[1]
        bucket = self.executor.bucket(len(values), len(parts) if is_tiled else 1)
        batch, order = self.vision.family.image_batch(config, values, grid, bucket)
        results = np.stack(self.executor.compute(batch, bucket))[:, : len(order)]
        features = np.empty_like(results)
        features[:, order] = results
        side = self.vision.settings.merge_size
        size = grid[0] // side, grid[1] // side
        added = np.ascontiguousarray(features[1:].swapaxes(0, 1))
        return EncodedImage(features[0], size, parts, digest, added)
