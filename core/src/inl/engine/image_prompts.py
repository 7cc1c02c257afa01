"""Encodes the images of prompts, in turns with the steps that generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from inl.engine.fair_lock import FairLock
from inl.engine.prompt_images import MAX_IMAGES, PromptImages, expanded, placed
from inl.errors import NoKernel, RequestError
from inl.executor.vision_encoder import VisionEncoder
from inl.images.decoding import decode
from inl.workers.address import parse_worker

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.executor.vision_model import VisionModel
    from inl.images.decoding import Picture


class ImagePrompts:
    """Images of one model's prompts. Thread-safe."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._encoder: VisionEncoder | None = None
        self._lock: FairLock | None = None
        self._reason = "no encoder is loaded in this process"

    def load(self, config: EngineConfig) -> None:
        """Load the vision encoder, if there is one, on a device of this process."""
        vision = self._model.vision
        if vision is None or find_spec("PIL") is None:
            return
        divided = config.tensor_parallel > 1 or config.mesh is not None
        if divided or parse_worker(config.backend) is not None:
            self._reason = "images need one device of this process"
            return
        try:
            self._encoder = VisionEncoder.load(vision, config)
        except NoKernel as error:
            self._reason = str(error)

    def share(self, lock: FairLock, axes: int) -> None:
        """Take turns at a lock; axes: those of the positions that the runner takes."""
        self._lock = lock
        if not axes:
            self.close()
            self._reason = "its runner takes no positions along axes"

    def expanded(self, ids: Sequence[int], images: Sequence[Any]) -> list[int]:
        """Return token ids with a placeholder for each feature of images.

        Decodes the images, and computes nothing on the device. Raises
        :class:`~inl.errors.RequestError`.
        """
        vision, counts = self._vision, []
        merge = vision.settings.merge_size
        for number, picture in enumerate(decoded(images)):
            height, width = picture.pixels.shape[:2]
            grid = vision.settings.grid_of(height, width, f"images[{number}]")
            counts.append(grid[0] * grid[1] // merge**2)
        return expanded(ids, vision.placeholder, counts)

    def embeddings(self, ids: Sequence[int], images: Sequence[Any]) -> PromptImages:
        """Return the features of images at their placeholders in token ids.

        Each image is computed in a turn of its own. Raises
        :class:`~inl.errors.RequestError`.
        """
        vision, encoder, lock = self._vision, self._encoder, self._lock
        if encoder is None or lock is None:
            raise RequestError(f"images: cannot be encoded: {self._reason}")
        encoded = []
        for number, picture in enumerate(decoded(images)):
            work = partial(encoder.encode, picture, f"images[{number}]")
            encoded.append(lock.run(work))
        return placed(ids, vision.placeholder, encoded)

    def close(self) -> None:
        """Free the encoder."""
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    @property
    def _vision(self) -> VisionModel:
        if self._model.vision is None:
            raise RequestError(
                f"images: {self._model.name} has no vision encoder that is supported; "
                "accepted: text only"
            )
        return self._model.vision


def decoded(images: Sequence[Any]) -> Iterator[Picture]:
    """Yield the images of a prompt, each once it is asked for: it may take 192 MiB.

    Raises :class:`~inl.errors.RequestError`.
    """
    if len(images) > MAX_IMAGES:
        raise RequestError(f"images: found {len(images)}, accepts at most {MAX_IMAGES}")
    for number, image in enumerate(images):
        yield decode(image, f"images[{number}]")
