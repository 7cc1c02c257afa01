"""Opens the files of models, and starts their runners."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from inl.checkpoints.causal import causal
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.counts import check_counts
from inl.checkpoints.quantized.kv_cache_scheme import FIELD
from inl.checkpoints.sentence_transformers import PoolingModules, read_modules
from inl.errors import CheckpointError
from inl.executor.checkpoint_formats import open_checkpoint
from inl.executor.vision_model import VisionModel, find_projector, find_vision
from inl.models.both_ways import attends_both_ways, both_ways
from inl.models.fields import Fields, refuse_fields
from inl.models.registry import find_model
from inl.spec.cache import Slotted
from inl.spec.encoder import Encoder, Pooling
from inl.spec.model import Model
from inl.spec.model import is_recurrent as has_recurrent_state
from inl.weights.load import stored_specs
from inl.weights.plan import check_tensors, plan_weights
from inl.weights.quantize.report import QuantizationReport

if TYPE_CHECKING:
    from pathlib import Path


log = logging.getLogger("inl")


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A checkpoint and its architecture, without weights."""

    model: Model
    """Architecture; an encoder's is :attr:`encoder`."""
    config: Any
    checkpoint: Checkpoint
    taps: tuple[int, ...] = ()
    """Layers whose inputs each step also returns, for a draft head."""
    head: Any = None
    """The draft head, an :class:`~inl.speculation.draft_head.DraftHead`, if it has
    taps."""
    quantize: str | None = None
    """Kind that matrices are quantized to while they are loaded."""
    vision: VisionModel | None = None
    """The encoder of images, if the files have one that is supported."""
    unadapted: Checkpoint | None = None
    """The checkpoint before its layout was adapted to the architecture's."""
    opened: Checkpoint | None = None
    """The checkpoint as it was opened, before that of the language model was chosen."""

    @property
    def encoder(self) -> Encoder | None:
        """The architecture, if it is an encoder, which takes no steps."""
        model: Any = self.model
        return model if isinstance(model, Encoder) else None

    @property
    def modules(self) -> PoolingModules:
        """How the files pool hidden states; by default the last, with length 1.

        Of a model that generates. Raises :class:`~inl.errors.CheckpointError`.
        """
        return read_modules(self.checkpoint.path, Pooling("last"))

    @property
    def step_pooling(self) -> str:
        """What steps return of a row's hidden states: "last" or "mean".

        Files with modules that are not known are refused where texts are embedded.
        """
        try:
            kind = self.modules.pooling.kind
        except CheckpointError:
            return "last"
        return "mean" if kind == "mean" else "last"

    @property
    def files(self) -> Checkpoint:
        """The checkpoint with the layers that predict further tokens."""
        return self.unadapted or self.checkpoint

    @property
    def text_file(self) -> Checkpoint:
        """The checkpoint as it was opened, with the names of its files."""
        return self.opened or self.files

    @property
    def name(self) -> str:
        """File or folder name."""
        return self.checkpoint.path.name

    def quantized(self, kind: str) -> LanguageModel:
        """Return the model with the matrices of its layers quantized while loading.

        kind: "fp8", "int8" or "int4", see
        :attr:`~inl.config.EngineConfig.quantize`. Raises
        :class:`~inl.errors.RequestError` for another kind, and for a model that is
        quantized already.
        """
        if kind == self.quantize:
            return self
        from inl.weights.quantize.select import quantizing

        checkpoint = quantizing(self.model, self.config, self.checkpoint, kind)
        return replace(self, checkpoint=checkpoint, quantize=kind)

    @property
    def quantization(self) -> QuantizationReport | None:
        """The errors of :meth:`quantized`; reads matrices that are not loaded yet."""
        if self.quantize is None:
            return None
        from inl.weights.quantize.checkpoint import QuantizingCheckpoint

        assert isinstance(self.checkpoint, QuantizingCheckpoint), "quantized() makes it"
        return self.checkpoint.quantization()


def open_model(path: str | Path) -> LanguageModel:
    """Open a model's files and check its config and the shapes of its tensors.

    Reads no weights. Raises :class:`~inl.errors.ModelError`.
    """
    return read_model(open_checkpoint(path))


def read_model(checkpoint: Checkpoint) -> LanguageModel:
    """Check the config of an open checkpoint and the shapes of its tensors.

    Logs a warning that names the config fields that are ignored. Raises
    :class:`~inl.errors.ModelError`.
    """
    opened = checkpoint
    vision = find_vision(checkpoint) or find_projector(checkpoint)
    checkpoint = causal(checkpoint)
    if checkpoint.config.get(FIELD):
        from inl.checkpoints.quantized.checkpoint import quantized

        checkpoint = quantized(checkpoint)
    model = find_model(checkpoint.config, checkpoint.path)
    tensors = len(checkpoint.names())
    check_counts(checkpoint.config, tensors, str(checkpoint.path))
    fields = Fields(checkpoint.config)
    if isinstance(model, Model) and attends_both_ways(fields):
        model = cast("Model", both_ways(model))
    try:
        config = model.config(fields)
        refuse_fields(fields)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    _warn_of(fields, checkpoint)
    unadapted = checkpoint
    config, checkpoint = model.adapt(config, checkpoint)
    stored = stored_specs(checkpoint)
    groups = plan_weights(model.weights(config), (), stored)
    check_tensors(groups, stored, str(checkpoint.path))
    return LanguageModel(
        model, config, checkpoint, vision=vision, unadapted=unadapted, opened=opened
    )


def _warn_of(fields: Fields, checkpoint: Checkpoint) -> None:
    """Log the fields that are ignored."""
    unread = fields.unread()
    if unread:
        log.warning(
            "%s: config fields that are not known and ignored: %s",
            checkpoint.path,
            ", ".join(unread),
        )


def longest_context(language: LanguageModel) -> int:
    """Return the largest context in tokens that an engine's config may ask for."""
    longer = getattr(language.config, "longer", None)
    return int(longer[0] if longer else language.config.max_tokens)


def is_replayed(language: LanguageModel) -> bool:
    """Whether the model has state that only computing token by token restores."""
    return "replay" in _rebuilds(language)


def is_recurrent(language: LanguageModel) -> bool:
    """Whether the model has state that every token changes."""
    return has_recurrent_state(language.model, language.config)


def takes_snapshots(language: LanguageModel) -> bool:
    """Whether copies of a slot continue sequences in any slot."""
    state = language.model.state(language.config)
    slotted = [item for item in state if isinstance(item, Slotted)]
    return bool(slotted) and all("snapshot" in item.restores for item in slotted)


def verifies_drafts(language: LanguageModel) -> bool:
    """Whether the model's state can go back to before a rejected draft."""
    state = language.model.state(language.config)
    return all("drafts" in item.restores for item in state if isinstance(item, Slotted))


def _rebuilds(language: LanguageModel) -> set[str]:
    state = language.model.state(language.config)
    return {item.rebuild for item in state if isinstance(item, Slotted)}
