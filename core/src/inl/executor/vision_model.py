"""The vision encoder in the files of a model of images and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.files.json_text import read_json
from inl.errors import CheckpointError
from inl.images.qwen_patches import PatchSettings, read_settings
from inl.models import qwen3_vision, qwen25_vision

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.spec.encoder import Encoder, SequenceBatch

ENCODERS: Final = {"qwen2_5_vl": qwen25_vision, "qwen3_vl": qwen3_vision}
"""Modules of encoders by ``model_type`` of the whole model."""
PREFIXES: Final = ("model.visual.", "visual.")
PREPROCESSOR: Final = "preprocessor_config.json"
PLACEHOLDER: Final = 151655
"""Default ``image_token_id``."""


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision encoder, without weights, and how images are given to it."""

    model: Encoder
    config: Any
    checkpoint: Checkpoint
    settings: PatchSettings
    placeholder: int
    """Token id at the place of each feature."""
    image_batch: Callable[..., tuple[SequenceBatch, Any]]
    """(config, patches, grid, bucket) -> batch of an image, and the order in which its
    features leave the encoder."""

    @property
    def encoder(self) -> Encoder:
        """The architecture."""
        return self.model


def find_vision(checkpoint: Checkpoint) -> VisionModel | None:
    """Return the vision encoder of a checkpoint that has a supported one.

    Raises :class:`~inl.errors.CheckpointError` for its config and settings.
    """
    kind = checkpoint.config.get("model_type")
    fields = checkpoint.config.get("vision_config")
    if not isinstance(kind, str) or kind not in ENCODERS:
        return None
    names = {
        name.removeprefix(prefix): name
        for name in checkpoint.names()
        for prefix in PREFIXES
        if name.startswith(prefix)
    }
    if not names or not isinstance(fields, Mapping):
        return None
    pieces = {
        short: Piece((name,), checkpoint.spec(name)[1]) for short, name in names.items()
    }
    own = AdaptedCheckpoint(checkpoint, pieces, config=fields)
    module, file = ENCODERS[kind], checkpoint.path / PREPROCESSOR
    try:
        encoder = module.MODEL
        config, adapted = encoder.adapt(encoder.config(fields), own)
        given = read_json(file) if file.is_file() else {}
        settings = read_settings(given, fields)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    placeholder = checkpoint.config.get("image_token_id", PLACEHOLDER)
    if type(placeholder) is not int or placeholder < 0:
        raise CheckpointError(
            f"{checkpoint.path}: config field 'image_token_id': found {placeholder!r}, "
            "expected a token id"
        )
    return VisionModel(
        encoder, config, adapted, settings, placeholder, module.image_batch
    )
