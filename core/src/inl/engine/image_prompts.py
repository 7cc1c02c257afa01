"""Encodes the images of prompts, in turns with the steps that generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from inl.engine.fair_lock import FairLock
from inl.engine.prompt_images import MAX_IMAGES, PromptImages, expanded, placed
from inl.errors import NoKernel, RequestError
from inl.executor.vision_encoder import EncodedImage, VisionEncoder
from inl.images.decoding import decode
from inl.workers.address import parse_worker

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.executor.vision_model import VisionModel
    from inl.images.decoding import Picture
    from inl.protocol.runner import Limits
    from inl.text.tokenizer import Tokenizer


class ImagePrompts:
    """Images of one model's prompts. Thread-safe."""

    def __init__(
        self, model: LanguageModel, tokenizer: Callable[[str], Tokenizer]
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._config: EngineConfig | None = None
        self._encoder: VisionEncoder | None = None
        self._lock: FairLock | None = None
        self._reason = "no encoder is loaded in this process"

    def enable(self, config: EngineConfig) -> None:
        """Allow images, whose encoder the first one loads on a device of this process.

        Texts alone so pay neither its memory nor its time.
        """
        if self._model.vision is None or find_spec("PIL") is None:
            return
        divided = config.tensor_parallel > 1 or config.mesh is not None
        if divided or parse_worker(config.backend) is not None:
            self._reason = "images need one device of this process"
            return
        self._config = config

    def share(self, lock: FairLock, limits: Limits) -> None:
        """Take turns at a lock; limits: of the runner that computes the prompts."""
        self._lock = lock
        if self._model.vision is None:
            return
        inputs = self._model.model.inputs(self._model.config)
        if inputs.axes > limits.axes or len(inputs.feature_layers) > len(
            limits.feature_layers
        ):
            self._config = None
            self._reason = "its runner takes no positions along axes"
        elif inputs.spans and not limits.spans:
            self._config = None
            self._reason = "no kernel of its runner attends in both directions"

    @property
    def mark(self) -> tuple[str, str] | None:
        """What a chat template writes for an image, and what stands there instead."""
        vision = self._model.vision
        return None if vision is None else vision.family.mark

    def expanded(self, ids: Sequence[int], images: Sequence[Any]) -> list[int]:
        """Return token ids with the tokens of images in place of their placeholders.

        Decodes the images, and computes nothing on the device. Raises
        :class:`~inl.errors.RequestError`.
        """
        vision, tokens = self._vision, []
        for number, picture in enumerate(decoded(images)):
            height, width = picture.pixels.shape[:2]
            grid = vision.settings.grid_of(height, width, f"images[{number}]")
            tokens.append(self._tokens(vision, grid))
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

        Each image is computed in a turn of its own. Raises
        :class:`~inl.errors.RequestError`.
        """
        vision, lock = self._vision, self._lock
        if self._config is None or lock is None:
            raise RequestError(f"images: cannot be encoded: {self._reason}")
        encoded = [
            lock.run(partial(self._encode, picture, f"images[{number}]"))
            for number, picture in enumerate(decoded(images))
        ]
        inputs = self._model.model.inputs(self._model.config)
        return placed(
            ids, vision.placeholder, encoded, has_axes=bool(inputs.axes),
            has_spans=inputs.spans,
        )  # fmt: skip

    def check_text(self, ids: Sequence[int]) -> None:
        """Raise :class:`~inl.errors.RequestError` for placeholders without images."""
        vision = self._model.vision
        if vision is not None and vision.placeholder in ids:
            raise RequestError(
                f"prompt: found placeholders (token {vision.placeholder}) without "
                "images; give the images too"
            )

    def _encode(self, picture: Picture, where: str) -> EncodedImage:
        """Encode an image in a turn of its own."""
        if self._config is None:
            raise RequestError(f"images: cannot be encoded: {self._reason}")
        if self._encoder is None:
            try:
                self._encoder = VisionEncoder.load(self._vision, self._config)
            except NoKernel as error:
                self._config, self._reason = None, str(error)
                raise RequestError(f"images: cannot be encoded: {error}") from error
        return self._encoder.encode(picture, where)

    def close(self) -> None:
        """Free the encoder; encodes no more images."""
        self._config, self._reason = None, "the engine is closed"
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
