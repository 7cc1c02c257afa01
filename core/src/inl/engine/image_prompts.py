"""Images of prompts: their tokens, their patches and their features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.engine.fair_lock import FairLock
from inl.engine.image_queue import ImageQueue, QueuedImage
from inl.engine.prompt_images import (
    PromptImages,
    check_count,
    check_places,
    expanded,
    placed,
)
from inl.errors import NoKernel, RequestError
from inl.executor.vision_encoder import EncodedImage, VisionEncoder, own_device
from inl.images.decoding import ImageDecoder
from inl.images.qwen_patches import Patches
from inl.workers.address import parse_worker

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.engine.dispatcher import RequestDispatcher
    from inl.engine.encoder_load import EncoderLoad
    from inl.executor.model_loader import LanguageModel
    from inl.executor.vision_model import VisionModel
    from inl.images.decoding import Size
    from inl.protocol.runner import Limits
    from inl.text.tokenizer import Tokenizer

MAX_PIXELS: Final = 1 << 29
"""Most pixels of all images of a prompt, such as 44 photos of 12 megapixels: seconds of
decoding."""

NO_PATCHES: Final = Patches(np.zeros((0, 0), np.float32), (0, 0))
"""Of an image whose features are known."""


class ImagePrompts:
    """Images of one model's prompts. Thread-safe."""

    def __init__(
        self, model: LanguageModel, tokenizer: Callable[[str], Tokenizer]
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._config: EngineConfig | None = None
        self._device: str | None = None
        """That of ``vision_backend``."""
        self._encoder: VisionEncoder | None = None
        self._queue: ImageQueue | None = None
        self._decoder = ImageDecoder()
        self._preparing = FairLock()
        """Around a decoded image, which may take 200 MiB: one at a time."""
        self._reason = "no encoder is loaded in this process"

    def enable(self, config: EngineConfig) -> None:
        """Allow images, whose encoder the first one loads on a device of this process.

        Texts alone so pay neither its memory nor its time. Raises
        :class:`~inl.errors.DeviceError` for a ``vision_backend`` that there is not.
        """
        if self._model.vision is None or find_spec("PIL") is None:
            return
        divided = config.tensor_parallel > 1 or config.mesh is not None
        divided = divided or config.division.hosts > 1
        devices = config.backend, config.vision_backend or config.backend
        if divided or any(parse_worker(each) is not None for each in devices):
            self._reason = "images need one device of this process"
            return
        self._device = own_device(config)
        self._config = config

    def share(self, dispatcher: RequestDispatcher, limits: Limits, device: str) -> None:
        """Encode between steps.

        limits, device: of the runner that computes the prompts.
        """
        if self._model.vision is None:
            return  # an encoder of texts has no inputs of steps
        self._queue = ImageQueue(
            dispatcher, self._loaded, budget=limits.token_budget,
            is_beside=self._device not in (None, device),
        )  # fmt: skip
        self._queue.counts.device = self._device or device
        inputs = self._model.model.inputs(self._model.config)
        if inputs.axes > limits.axes or len(inputs.feature_layers) > len(
            limits.feature_layers
        ):
            self._config = None
            self._reason = "its runner takes no positions along axes"
        elif inputs.spans and not limits.spans:
            self._config = None
            self._reason = "no kernel of its runner attends in both directions"

    def marked(self, text: str, images: Sequence[Any]) -> str:
        """Return a text with what stands for images in place of a template's marks.

        Reads their headers only. Raises :class:`~inl.errors.RequestError`.
        """
        vision = self._vision
        if vision.family.mark is None:
            return text
        mark, each = vision.family.mark
        first, *rest = text.split(mark)
        check_places(len(rest), len(images))
        parts = [first]
        for number, (size, after) in enumerate(
            zip(self._sizes(images), rest, strict=True)
        ):
            grid = vision.settings.grid_of(*size, f"images[{number}]")
            pieces = vision.settings.pieces(grid)
            parts += [each if isinstance(piece, int) else piece for piece in pieces]
            parts.append(after)
        return "".join(parts)

    def expanded(self, ids: Sequence[int], images: Sequence[Any]) -> list[int]:
        """Return token ids with the tokens of images in place of their placeholders.

        Reads their headers only. Raises :class:`~inl.errors.RequestError`.
        """
        vision = self._vision
        tokens: list[list[int]] = []
        for number, size in enumerate(self._sizes(images)):
            grid = vision.settings.grid_of(*size, f"images[{number}]")
            if vision.family.mark is None:
                tokens.append(self._tokens(vision, grid))
                continue
            # Each part has a place of its own in the text, see marked().
            tokens += [
                [vision.placeholder] * count
                for count in vision.settings.pieces(grid)
                if isinstance(count, int)
            ]
        return expanded(ids, vision.placeholder, tokens)

    def _tokens(self, vision: VisionModel, grid: tuple[int, int]) -> list[int]:
        """Return the ids of an image: placeholders, and texts between them."""
        ids: list[int] = []
        for piece in vision.settings.pieces(grid):
            if isinstance(piece, int):
                ids += [vision.placeholder] * piece
            else:
                ids += self._tokenizer("images").encode(piece, add_special=False)
        return ids

    def embeddings(self, ids: Sequence[int], images: Sequence[Any]) -> PromptImages:
        """Return the features of images at their placeholders in token ids.

        Images are prepared outside of the turns that encode them, several in a program.
        Raises :class:`~inl.errors.RequestError`.
        """
        vision, queue = self._vision, self._check_enabled()
        for number, size in enumerate(self._sizes(images)):
            vision.settings.grid_of(*size, f"images[{number}]")
        encoded: list[EncodedImage] = []
        prepared: list[QueuedImage] = []
        patches = 0
        for number, image in enumerate(images):
            where = f"images[{number}]"
            each = self._preparing.run(partial(self._prepare, image, where, queue))
            count = 0 if each.done else len(each.patches.values)
            if prepared and patches + count > queue.budget:
                encoded += queue.encode(prepared)
                prepared, patches = [], 0
            prepared.append(each)
            patches += count
        encoded += queue.encode(prepared)
        inputs = self._model.model.inputs(self._model.config)
        return placed(
            ids, vision.placeholder, encoded, has_axes=bool(inputs.axes),
            has_spans=inputs.spans,
        )  # fmt: skip

    @property
    def load(self) -> EncoderLoad | None:
        """What the encoder of images has computed; ``None`` where none can be."""
        if self._config is None or self._queue is None:
            return None
        return self._queue.counts

    def check_text(self, ids: Sequence[int]) -> None:
        """Raise :class:`~inl.errors.RequestError` for placeholders without images."""
        vision = self._model.vision
        if vision is not None and vision.placeholder in ids:
            raise RequestError(
                f"prompt: found placeholders (token {vision.placeholder}) without "
                "images; give the images too"
            )

    def _sizes(self, images: Sequence[Any]) -> Iterator[Size]:
        """Yield the sizes of images.

        Raises :class:`~inl.errors.RequestError` for too many images, or pixels of all.
        """
        check_count(images)
        pixels = 0
        for number, image in enumerate(images):
            where = f"images[{number}]"
            size = self._decoder.size(image, where)
            pixels += size.height * size.width
            if pixels > MAX_PIXELS:
                raise RequestError(
                    f"{where}: found {pixels} pixels in the images up to this one, "
                    f"accepts {MAX_PIXELS}"
                )
            yield size

    def _prepare(self, image: Any, where: str, queue: ImageQueue) -> QueuedImage:
        """Return an image for the queue: its patches, or the features of before."""
        picture, encoder = self._decoder.decode(image, where), self._encoder
        found = None if encoder is None else encoder.cached(picture.digest)
        if found is not None:
            return QueuedImage(NO_PATCHES, picture.digest, found)
        patches, digest = (
            self._vision.settings.patches(picture.pixels, where), picture.digest,
        )  # fmt: skip
        del picture
        queue.make_room(len(patches.values))
        return QueuedImage(patches, digest)

    def _loaded(self) -> VisionEncoder:
        """Return the encoder, which the first image loads."""
        if self._encoder is None:
            self._check_enabled()  # it may have been closed since
            assert self._config is not None
            try:
                self._encoder = VisionEncoder.load(self._vision, self._config)
            except NoKernel as error:
                self._config, self._reason = None, str(error)
                raise RequestError(f"images: cannot be encoded: {error}") from error
        return self._encoder

    def _check_enabled(self) -> ImageQueue:
        """Return the queue; raises if there is none."""
        if self._config is None or self._queue is None:
            raise RequestError(f"images: cannot be encoded: {self._reason}")
        return self._queue

    def close(self) -> None:
        """Free the encoder and end the decoder; encodes no more images."""
        self._decoder.close()
        self._config, self._reason = None, "the engine is closed"
        if self._queue is None or not self._queue.is_beside:
            self._free()  # the caller holds the lock of the turns
        else:
            self._queue.lock.run(self._free)

    def _free(self) -> None:
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
