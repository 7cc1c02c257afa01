"""The vision encoder in the files of a model of images and text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.gguf.checkpoint import GgufCheckpoint
from inl.checkpoints.gguf.projector import ProjectorCheckpoint, projectors_beside
from inl.errors import CheckpointError
from inl.images import (
    gemma_patches,
    llama_patches,
    pixtral_patches,
    qwen_patches,
    square_patches,
)
from inl.models import (
    gemma4_vision,
    llama4_vision,
    paddleocr_vision,
    pixtral_vision,
    qwen3_vision,
    qwen25_vision,
    siglip_vision,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint
    from inl.images.qwen_patches import Patches
    from inl.spec.encoder import Encoder, SequenceBatch


log = logging.getLogger("inl")


class ImageSettings(Protocol):
    """How images become patches, and where their features stand in a prompt."""

    @property
    def merge_size(self) -> int:
        """Patches of a side of what becomes one feature."""

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""

    def grid_of(self, height: int, width: int, where: str, /) -> tuple[int, int]:
        """Return the rows and columns of patches of an image.

        Raises :class:`~inl.errors.RequestError`, which names ``where``.
        """

    def patches(self, pixels: NDArray[np.uint8], where: str, /) -> Patches:
        """Return the patches of an image [height, width, 3]; raises as above."""

    def pieces(self, grid: tuple[int, int], /) -> tuple[int | str, ...]:
        """Return what stands for an image: numbers of features, and texts."""


class VisionFamily(NamedTuple):
    """What models with one value of ``model_type`` share."""

    encoder: Encoder
    image_batch: Callable[..., tuple[SequenceBatch, Any]]
    """(config of the encoder, patches of images, bucket) -> their batch, and the places
    of its features in the order of the images."""
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """(config of the whole model) -> that of the encoder."""
    names: Mapping[str, str]
    """Prefixes of the encoder's tensors, which may follow "model.", and those that its
    weights have instead."""
    settings: Callable[[Mapping[str, Any], Mapping[str, Any]], ImageSettings]
    """(``preprocessor_config.json``, config of the encoder) -> settings."""
    placeholder: int
    """Default ``image_token_id``."""
    mark: tuple[str, str] | None = None
    """What a chat template writes for an image, and what stands there in prompts."""
    extra_tokens: int = 0
    """Tokens of each sequence beside its patches."""


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = config["vision_config"]
    return fields


def _without_deepstack(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config["vision_config"], "deepstack_visual_indexes": []}


def _qwen(
    module: Any, fields: Callable[..., Mapping[str, Any]] = _vision,
    placeholder: int = 151655,
) -> VisionFamily:  # fmt: skip
    return VisionFamily(
        module.MODEL, module.image_batch, fields, {"visual.": ""},
        qwen_patches.read_settings, placeholder,
    )  # fmt: skip


_TILED: Final = VisionFamily(
    siglip_vision.MODEL, siglip_vision.image_batch, siglip_vision.tile_fields,
    siglip_vision.TILE_NAMES, square_patches.read_tiles, 128257,
)  # fmt: skip
GEMMA_MARK: Final = (
    "<start_of_image>",
    "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
)
FAMILIES: Final = {
    "qwen2_5_vl": _qwen(qwen25_vision),
    "qwen3_vl": _qwen(qwen3_vision),
    "qwen3_5": _qwen(qwen3_vision, _without_deepstack, 248056),
    "qwen3_5_moe": _qwen(qwen3_vision, _without_deepstack, 248056),
    "mistral3": VisionFamily(
        pixtral_vision.MODEL, pixtral_vision.image_batch, pixtral_vision.fields,
        pixtral_vision.NAMES, pixtral_patches.read_settings, 10,
    ),
    "gemma3": VisionFamily(
        siglip_vision.MODEL, siglip_vision.image_batch, siglip_vision.gemma_fields,
        siglip_vision.GEMMA_NAMES, square_patches.read_square, 262144, GEMMA_MARK,
    ),
    "gemma4": VisionFamily(
        gemma4_vision.MODEL, gemma4_vision.image_batch, gemma4_vision.fields,
        gemma4_vision.NAMES, gemma_patches.read_settings, 258880,
    ),
    "llama4": VisionFamily(
        llama4_vision.MODEL, llama4_vision.image_batch, llama4_vision.fields,
        llama4_vision.NAMES, llama_patches.read_settings, 200092,
        ("<|image|>", "<|patch|>"), extra_tokens=1,
    ),
    "paddleocr_vl": VisionFamily(
        paddleocr_vision.MODEL, qwen3_vision.image_batch, paddleocr_vision.fields,
        paddleocr_vision.NAMES,
        partial(qwen_patches.read_settings, plain=qwen_patches.PADDLE), 100295,
    ),
    "idefics3": _TILED,
    "smolvlm": _TILED,
}  # fmt: skip
"""Families by ``model_type`` of the whole model."""


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision encoder, without weights, and how images are given to it."""

    family: VisionFamily
    config: Any
    checkpoint: Checkpoint
    settings: ImageSettings
    placeholder: int
    """Token id at the place of each feature."""

    @property
    def encoder(self) -> Encoder:
        """The architecture."""
        return self.family.encoder


def find_vision(checkpoint: Checkpoint) -> VisionModel | None:
    """Return the vision encoder of a checkpoint that has a supported one.

    Raises :class:`~inl.errors.CheckpointError` for its config and settings.
    """
    kind, config = checkpoint.config.get("model_type"), checkpoint.config
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(config.get("vision_config"), Mapping):
        return None
    names = {
        own: name
        for name in checkpoint.names()
        if (own := _own_name(name, family.names)) is not None
    }
    if not names:
        return None
    pieces = {
        own: Piece((name,), checkpoint.spec(name)[1]) for own, name in names.items()
    }
    try:
        fields = family.fields(config)
        renamed = AdaptedCheckpoint(checkpoint, pieces, config=fields)
        shaped, adapted = family.encoder.adapt(family.encoder.config(fields), renamed)
        settings = family.settings(checkpoint.image_processor, fields)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    placeholder = config.get(
        "image_token_id", config.get("image_token_index", family.placeholder)
    )
    if type(placeholder) is not int or placeholder < 0:
        raise CheckpointError(
            f"{checkpoint.path}: config field 'image_token_id': found {placeholder!r}, "
            "expected a token id"
        )
    return VisionModel(family, shaped, adapted, settings, placeholder)


def find_projector(checkpoint: Checkpoint) -> VisionModel | None:
    """Return the vision encoder in a file beside that of a GGUF model.

    Files that are not of this model are passed over; of several, the first by name is
    used.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return None
    for path in projectors_beside(checkpoint.path):
        try:
            return open_projector(path, checkpoint)
        except CheckpointError as error:
            log.info("not used as a vision encoder: %s", error)
    return None


def open_projector(path: Path, checkpoint: Checkpoint) -> VisionModel:
    """Return the vision encoder in a GGUF file.

    checkpoint: of the language model. Raises :class:`CheckpointError` for other files.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        raise CheckpointError(
            f"{path}: found a vision encoder beside {checkpoint.path}; accepted: the "
            "one in the files of a model that is no GGUF file"
        )
    found = find_vision(ProjectorCheckpoint(path, checkpoint))
    assert found is not None, "its model_type is a family's"
    return found


def _own_name(name: str, prefixes: Mapping[str, str]) -> str | None:
    """Return a tensor's name in the encoder, ``None`` for another model's."""
    name = name.removeprefix("model.")
    for prefix, own in prefixes.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None
